"""Preference pairs from a model's own wrong answers: RLHF ranks what the policy writes at its start."""

import torch
from transformers import PreTrainedModel

from lit_rlkv.callbacks.progress import track
from lit_rlkv.config import ConfigError
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tasks import Preferences
from lit_rlkv.data.tokenizers import check_encodable, decode_completions, encode_prompts, end_token_ids
from lit_rlkv.rng import derive_seed, stream
from lit_rlkv.rollout import generate
from lit_rlkv.stages.parts import Parts
from lit_rlkv.types import PreferencePair, Problem


def own_mistakes(parts: Parts, backbone: PreTrainedModel, n_prompts: int, seed: int) -> Preferences:
    """Worked solutions preferred to what the model wrote instead, under the run's cache, and got wrong.

    Raises:
        ConfigError: it got none wrong that could be learned from.
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
            f"sft.mistakes.n_prompts={n_prompts}: the warm model answered all of them right, so there are no "
            "mistakes to learn from; use 0"
        )
    return Preferences(pairs, "the model's own mistakes")


@torch.no_grad()
def _wrong_answers(
    parts: Parts, backbone: PreTrainedModel, problems: list[Problem], generator: torch.Generator
) -> list[PreferencePair]:
    prompts = encode_prompts(parts.tokenizer, [p.prompt for p in problems]).to(backbone.device)
    with parts.fabric.autocast():
        rollout = generate(
            backbone,
            prompts.token_ids,
            prompts.attention_mask,
            cache=parts.cache,
            max_new_tokens=parts.cfg.rollout.max_new_tokens,
            eos_token_id=end_token_ids(parts.tokenizer),
            pad_token_id=parts.tokenizer.pad_token_id,
            temperature=parts.cfg.rollout.temperature,
            generator=generator,
            cuda_graph=parts.cfg.rollout.cuda_graph,
        )
    answers = decode_completions(parts.tokenizer, rollout.token_ids, rollout.is_action)
    return [
        PreferencePair(problem.prompt, problem.solution, answer)
        for problem, answer in zip(problems, answers, strict=True)
        if parts.task.score(problem, answer) == 0 and _is_text(parts, answer)
    ]


def _is_text(parts: Parts, answer: str) -> bool:
    """False where a model has written special tokens, which no text encodes to."""
    try:
        check_encodable(parts.tokenizer, answer)
    except ValueError:
        return False
    return True
