"""Score a policy on held-out prompts, with each cache that a user may want to run it with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from lit_rlkv.data.tasks import Task
from lit_rlkv.data.tokenizers import decode_completions, encode_prompts
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.masking import masked_mean
from lit_rlkv.models import replay_logps
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.scoring import score_rollout
from lit_rlkv.rewards import score
from lit_rlkv.rng import stream
from lit_rlkv.rollout import generate
from lit_rlkv.types import EvalRow, Problem, Rollout


@dataclass(frozen=True)
class EvalConfig:
    """How a policy is scored."""

    max_new_tokens: int
    temperature: float
    """Of the responses that are scored; 0 is greedy."""
    sampling_temperature: float
    """Of the responses that mismatch and replay gap are measured on: a greedy choice has no log-prob."""
    n_mismatch: int
    batch_size: int
    seed: int
    rows_per_pass: int | None = None
    """Most responses in one forward when the reward role scores them; None: all of a batch."""
    cuda_graph: bool | None = None
    """Whether the decode step is captured; None: on CUDA."""


class Evaluator:
    """The policy on one list of held-out problems; where there is a reward role, its opinion too."""

    def __init__(
        self,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        problems: Sequence[Problem],
        config: EvalConfig,
    ) -> None:
        self.roles = roles
        self.tokenizer = tokenizer
        self.task = task
        self.problems = problems
        self.config = config

    @torch.no_grad()
    def score_cache(self, cache: CacheSpec) -> tuple[EvalRow, Rollout]:
        """Accuracy and mismatch with one cache, and the rollout on which the mismatch was measured."""
        config, n = self.config, len(self.problems)
        n_right, n_tokens, learned, kv_bytes = 0.0, 0, 0.0, 0
        for start in range(0, n, config.batch_size):
            batch = self.problems[start : start + config.batch_size]
            rollout = self._generate(batch, cache, config.temperature, start)
            completions = decode_completions(self.tokenizer, rollout.token_ids, rollout.is_action)
            n_right += float(score(self.task.score, batch, completions).total.sum())
            learned += self._learned_reward(rollout)
            n_tokens += int(rollout.is_action.sum())
            kv_bytes = max(kv_bytes, rollout.kv_bytes)
        sampled = self._generate(self.problems[: config.n_mismatch], cache, config.sampling_temperature, n)
        with acting_as(self.roles, "policy") as backbone:
            shadow, dense = (
                replay_logps(backbone, sampled, shadow=shadow, temperature=config.sampling_temperature)
                for shadow in (True, False)
            )
        row = EvalRow(
            cache=cache.label,
            budget=None if cache.is_dense else cache.budget,
            accuracy=n_right / n,
            n_problems=n,
            mean_length=n_tokens / n,
            kv_bytes=kv_bytes,
            kl=float(masked_mean(sampled.sampler_logps - dense, sampled.is_action)),
            replay_gap=float((shadow - sampled.sampler_logps).abs().max()),
            learned_reward=learned / n if "reward" in self.roles.needed else None,
        )
        return row, sampled

    def _learned_reward(self, rollout: Rollout) -> float:
        """Sum over the responses; 0 where there is no reward role."""
        if "reward" not in self.roles.needed:
            return 0.0
        rows_per_pass = self.config.rows_per_pass
        scores = score_rollout(
            self.roles, rollout, {"reward": False}, temperature=1.0, rows_per_pass=rows_per_pass
        )
        return float(scores["reward"].sum())

    def _generate(
        self, problems: Sequence[Problem], cache: CacheSpec, temperature: float, start: int
    ) -> Rollout:
        device = self.roles.backbone("policy").device
        prompts = encode_prompts(self.tokenizer, [p.prompt for p in problems]).to(device)
        generator = stream(self.config.seed, "evaluate", cache.label, start, device=device)
        with acting_as(self.roles, "policy") as backbone:
            return generate(
                backbone,
                prompts.token_ids,
                prompts.attention_mask,
                cache=cache,
                max_new_tokens=self.config.max_new_tokens,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
                temperature=temperature,
                generator=generator,
                cuda_graph=self.config.cuda_graph,
            )
