"""Preference pairs from a model's own wrong answers: RLHF ranks what the policy writes at its start."""

import torch
from transformers import PreTrainedModel

from lit_rlkv.config import ConfigError
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import check_encodable, decode_completions, encode_prompts
from lit_rlkv.experience.sample import sample_responses
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.reporting.progress import track
from lit_rlkv.rng import derive_seed, stream
from lit_rlkv.runs.context import RunContext
from lit_rlkv.tasks import Preferences
from lit_rlkv.tasks.rows import Table
from lit_rlkv.types import PreferencePair, Problem


def on_policy_preference_pairs(
    parts: RunContext, backbone: PreTrainedModel, n_prompts: int, seed: int
) -> Preferences:
    """Worked solutions preferred to what the model wrote instead, under the run's cache, and got wrong.

    Raises:
        ConfigError: it got none wrong that could be learned from.
        MemoryExhaustedError: its answers find too little memory; says what to lower.
    """
    source = PromptSource(parts.task, split="train", seed=derive_seed(seed, "answered"))
    problems = source.take(n_prompts)
    batch_size = parts.cfg.evaluation.batch_size
    pairs: list[PreferencePair] = []
    with track("mistakes", n_prompts) as advance:
        for start in range(0, n_prompts, batch_size):
            batch = problems[start : start + batch_size]
            pairs += _wrong_answers(
                parts, backbone, batch, stream(seed, "answer", start, device=backbone.device)
            )
            advance(len(batch))
    if not pairs:
        raise ConfigError(
            f"sft.on_policy_pairs.n_prompts={n_prompts}: the warm model answered all of them right, so there are no "
            "mistakes to learn from; use 0"
        )
    places = [f"own mistake {number}" for number in range(len(pairs))]
    return Preferences(Table("the model's own mistakes", pairs, places))


@torch.no_grad()
def _wrong_answers(
    parts: RunContext, backbone: PreTrainedModel, problems: list[Problem], generator: torch.Generator
) -> list[PreferencePair]:
    rollout_cfg, batch_size = parts.cfg.rollout, parts.cfg.evaluation.batch_size
    explained = explain_out_of_memory(
        lambda: (
            f"out of memory while the warm model answers, {len(problems)} prompts at a time; lower "
            f"evaluation.batch_size={batch_size} or rollout.max_new_tokens={rollout_cfg.max_new_tokens}"
        )
    )
    with explained, parts.fabric.autocast():
        rollout = sample_responses(
            backbone,
            parts.tokenizer,
            encode_prompts(parts.tokenizer, [p.prompt for p in problems]),
            cache=parts.cache,
            max_new_tokens=rollout_cfg.max_new_tokens,
            temperature=rollout_cfg.temperature,
            generator=generator,
            cuda_graph=rollout_cfg.cuda_graph,
        )
    answers = decode_completions(parts.tokenizer, rollout.input_ids, rollout.response_mask)
    scores = parts.accuracy(problems, answers).tolist()
    return [
        PreferencePair(problem.prompt, problem.solution, answer)
        for problem, answer, score in zip(problems, answers, scores, strict=True)
        if score == 0 and _is_text(parts, answer)
    ]


def _is_text(parts: RunContext, answer: str) -> bool:
    """False where a model has written special tokens, which no text encodes to."""
    try:
        check_encodable(parts.tokenizer, answer)
    except ValueError:
        return False
    return True
