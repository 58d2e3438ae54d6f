"""The training passes of the SFT stage, and the data of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from transformers import PreTrainedModel

from lit_rlkv.config import ConfigError, as_config_errors
from lit_rlkv.config.schema import SFTConfig
from lit_rlkv.data.chat import encode_prompts
from lit_rlkv.data.demonstrations import PreferenceDataModule, own_prompts
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import check_encodable, decode_completions
from lit_rlkv.data.validation import check_completions_fit
from lit_rlkv.experience.sample import sample_responses
from lit_rlkv.models.backbone import check_length
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.reporting.progress import track
from lit_rlkv.rng import derive_seed, stream
from lit_rlkv.runs.memory import evaluation_rows
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import REWARD_MODEL
from lit_rlkv.tasks import Task
from lit_rlkv.tasks.preferences import Preferences
from lit_rlkv.tasks.rows import Table
from lit_rlkv.types import PreferencePair, Problem


class WrongAnswers(Preferences):
    """Pairs of worked solutions and the model's wrong answers to training prompts; all are trained on."""

    is_divided = True


@dataclass(frozen=True)
class SFTPass:
    """One training pass over all weights of the backbone."""

    lm_weight: float | int
    reward_weight: float | int
    n_steps: int
    batch_size: int
    n_pairs: int
    seed: int
    """Seed of the problems and of the errors in rejected completions."""
    folder: str = "."
    """Folder below the SFT model's in which its weights are saved."""
    n_answered: int = 0
    """Prompts that the model answers first, for rejected completions; 0: the task corrupts solutions."""
    trains_scorer: bool = False
    """True if the scorer of evictions is trained, and the LM stays as it is."""


def training_passes(cfg: SFTConfig) -> list[SFTPass]:
    """Return the passes of a config: the LM head with or without the reward head, then a reward model."""
    is_shared = cfg.joint and cfg.n_pairs > 0 and cfg.reward_weight > 0
    first = SFTPass(
        lm_weight=1.0,
        reward_weight=cfg.reward_weight if is_shared else 0.0,
        n_steps=cfg.n_steps,
        batch_size=cfg.batch_size,
        n_pairs=cfg.n_pairs if is_shared else 0,
        seed=cfg.seed,
    )
    passes = [first]
    if cfg.eviction_steps > 0:
        seed = derive_seed(cfg.seed, "prompts", "evictions")
        passes.append(SFTPass(0.0, 0.0, cfg.eviction_steps, cfg.batch_size, 0, seed, trains_scorer=True))
    if not cfg.joint:
        seed = derive_seed(cfg.seed, "prompts", "reward")
        passes.append(SFTPass(0.0, 1.0, cfg.reward_steps, cfg.n_pairs, cfg.n_pairs, seed, REWARD_MODEL))
    pairs = cfg.on_policy_pairs
    if pairs.n_prompts > 0:
        last = SFTPass(
            lm_weight=1.0 if cfg.joint else 0.0,
            reward_weight=pairs.reward_weight,
            n_steps=pairs.n_steps,
            batch_size=cfg.batch_size,
            n_pairs=cfg.batch_size,
            seed=derive_seed(cfg.seed, "prompts", "mistakes"),
            folder="." if cfg.joint else REWARD_MODEL,
            n_answered=pairs.n_prompts,
        )
        passes.append(last)
    return passes


def pass_data(
    run: Run, stage: SFTPass, task: Task, tokens_per_pass: int = TOKENS_PER_PASS
) -> PreferenceDataModule:
    """Return the batches of a pass, whose worked solutions and pairs come from `task`."""
    ranks, environments = run.ranks, run.environments
    return PreferenceDataModule(
        task,
        PromptSource(task, split="train", seed=stage.seed),
        run.tokenizer,
        batch_size=stage.batch_size,
        n_pairs=stage.n_pairs,
        steps_per_loader=min(run.cfg.sft.steps_per_iteration, stage.n_steps),
        seed=stage.seed,
        ranks=ranks,
        tokens_per_pass=tokens_per_pass,
        tools=() if environments is None else environments.tools,
        prompts_of=own_prompts if environments is None else environments.prompts,
        observe=None if environments is None else environments.worked_observation,
    )


def check_data(run: Run, backbone: PreTrainedModel, passes: Sequence[SFTPass]) -> None:
    """Measure all rows and build one batch of each pass, so that bad data is refused before any work.

    Raises:
        ConfigError: the model cannot learn from the task's solutions or pairs.
    """
    with as_config_errors("task"):
        # The rejected sides of the others are not the task's.
        on_task_pairs = [stage for stage in passes if stage.n_answered == 0]
        has_pairs = any(stage.n_pairs > 0 for stage in on_task_pairs)
        check_completions_fit(backbone, run.sizes, has_pairs=has_pairs)
        for stage in passes:
            checked = stage if stage in on_task_pairs else replace(stage, n_pairs=0)
            batch = pass_data(run, checked, run.task).next_batch()
            sides = [batch.chosen, *([] if batch.rejected is None else [batch.rejected])]
            check_length(backbone, max(side.n_tokens for side in sides))


def on_policy_preference_pairs(
    run: Run, backbone: PreTrainedModel, n_prompts: int, seed: int
) -> WrongAnswers:
    """Return pairs of worked solutions and wrong answers that the model samples under the run's cache.

    The ranks take turns in batches of prompts; each gets the pairs of all, in the order of one process.

    Raises:
        ConfigError: the model answered every prompt correctly.
        MemoryExhaustedError: sampling ran out of memory.
    """
    source = PromptSource(run.task, split="train", seed=derive_seed(seed, "answered"))
    problems = source.take(n_prompts)
    batch_size = evaluation_rows(run, backbone, [run.parts.cache])
    ranks = run.ranks
    starts = range(0, n_prompts, batch_size)[ranks.rank :: ranks.size]
    own: list[tuple[int, list[PreferencePair]]] = []
    with track("mistakes", sum(min(batch_size, n_prompts - start) for start in starts)) as advance:
        for start in starts:
            batch = problems[start : start + batch_size]
            generator = stream(seed, "answer", start, device=backbone.device)
            on_progress = partial(advance.within, n_total=run.cfg.rollout.max_new_tokens)
            own.append((start, _wrong_answers(run, backbone, batch, generator, on_progress)))
            advance(len(batch))
    found = sorted(ranks.all_gather_object(own), key=itemgetter(0))
    pairs = [pair for _, of_batch in found for pair in of_batch]
    if not pairs:
        raise ConfigError(
            f"sft.on_policy_pairs.n_prompts={n_prompts}: the SFT model answered all of "
            "them correctly, so there are no rejected sides; use 0"
        )
    places = [f"wrong answer {number}" for number in range(len(pairs))]
    return WrongAnswers(Table("the model's wrong answers", pairs, places))


@torch.no_grad()
def _wrong_answers(
    run: Run,
    backbone: PreTrainedModel,
    problems: list[Problem],
    generator: torch.Generator,
    on_progress: Callable[[int], object],
) -> list[PreferencePair]:
    settings = run.cfg.rollout
    explained = explain_out_of_memory(
        lambda: (
            f"out of memory while the SFT model answers {len(problems)} prompts at a time; lower "
            f"evaluation.batch_size={len(problems)} or rollout.max_new_tokens={settings.max_new_tokens}"
        )
    )
    with explained, run.fabric.autocast():
        rollout = sample_responses(
            backbone,
            run.tokenizer,
            encode_prompts(run.tokenizer, [p.prompt for p in problems]),
            replace(settings, max_rows=None, replay_routing=False),
            cache=run.parts.cache,
            generator=generator,
            on_progress=on_progress,
            sampling=settings,
        )
    answers = decode_completions(run.tokenizer, rollout.input_ids, rollout.response_mask)
    scores = run.verified(problems, answers).tolist()
    return [
        PreferencePair(problem.prompt, problem.solution, answer)
        for problem, answer, score in zip(problems, answers, scores, strict=True)
        if score == 0 and _is_text(run, answer)
    ]


def _is_text(run: Run, answer: str) -> bool:
    """True if the answer can be encoded again; an answer with special tokens cannot."""
    try:
        check_encodable(run.tokenizer, answer)
    except ValueError:
        return False
    return True
