"""Cells of sampled rollouts: replay gaps, and what reweighting would leave of them, by response length."""

import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from pretrained_parts.prompts import chat_turns
from pretrained_parts.setting import DENSE, Cell
from sampled import gap
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv import Rollout, generate, replay_logps
from lit_rlkv.diagnostics import as_floats
from lit_rlkv.diagnostics.importance_ratios import correction_statistics, off_policy
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.loading import load_causal_lm
from lit_rlkv.rng import stream
from lit_rlkv.types import PromptBatch

STATISTICS = {
    "ess_tis": "tis/ess",
    "clipped": "tis/clipped",
    "masked": "mis/rejected",
    "ess_token": "token_ratio/ess",
    "ess_sequence": "sequence_ratio/ess_seq",
}
"""Names in the record, and in `kv/arms/*`."""
SHORTEST = 32
TOKENS_PER_PASS = 2400


class Models:
    """The model in both precisions, each loaded when it is first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _load(self, dtype: torch.dtype) -> PreTrainedModel:
        return prepare_backbone(load_causal_lm(self.folder, dtype)).eval()

    @cached_property
    def float32(self) -> PreTrainedModel:
        return self._load(torch.float32)

    @cached_property
    def bfloat16(self) -> PreTrainedModel:
        return self._load(torch.bfloat16)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder)


def measure(models: Models, cell: Cell) -> dict:
    """Return the results of one rollout at temperature 1, past end tokens."""
    model = models.bfloat16 if cell.block == "bf16" else models.float32
    prompts = _prompts(models.tokenizer, cell.rows)
    started_at = time.perf_counter()
    rollout = generate(
        model,
        prompts.input_ids,
        prompts.attention_mask,
        cache=cell.cache,
        max_new_tokens=cell.tokens,
        eos_token_id=None,
        pad_token_id=models.tokenizer.eos_token_id,
        generator=stream(0, "pretrained rollout"),
    )
    seconds = time.perf_counter() - started_at
    row = {
        "n_prompt_tokens": prompts.attention_mask.sum(dim=1).tolist(),
        "n_tokens": int(rollout.response_mask.sum()),
        "kv_bytes": rollout.kv_bytes,
        "rollout_seconds": seconds,
        "gap": gap(_logps(model, rollout, shadow=True), rollout),
    }
    if cell.block != "bf16" and cell.policy != DENSE:
        row["by_length"] = by_length(_logps(model, rollout, shadow=False), rollout)
    return row


def _prompts(tokenizer: PreTrainedTokenizerBase, n_rows: int) -> PromptBatch:
    """Return the first messages of chats."""
    chats = [[{"role": "user", "content": chat_turns(row)[0]}] for row in range(n_rows)]
    written = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
    ]
    found = tokenizer(written, return_tensors="pt", padding=True, padding_side="left")
    return PromptBatch(found.input_ids, found.attention_mask.bool())


@torch.no_grad()
def _logps(model: PreTrainedModel, rollout: Rollout, *, shadow: bool) -> Float[Tensor, "batch seq"]:
    """Return the replayed log-probs, a few rows at a time."""
    n_rows = max(TOKENS_PER_PASS // rollout.input_ids.shape[1], 1)
    parts = [rollout.rows(slice(i, i + n_rows)) for i in range(0, len(rollout.input_ids), n_rows)]
    return torch.cat([replay_logps(model, part, shadow=shadow) for part in parts])


def by_length(dense_logps: Float[Tensor, "batch seq"], rollout: Rollout) -> dict[str, dict[str, float]]:
    """Return, by response length, the statistics of weights for a learner with all keys."""
    log_ratio = dense_logps - rollout.rollout_logps
    n_tokens = int(rollout.response_mask.sum(dim=1).max())
    lengths = [SHORTEST * 2**power for power in range(20) if SHORTEST * 2**power <= n_tokens]
    found = {}
    for length in lengths:
        mask = first_tokens(rollout.response_mask, length)
        arms = as_floats(correction_statistics(log_ratio, mask))
        row = {name: arms[f"kv/arms/{metric}"] for name, metric in STATISTICS.items()}
        short = replace(rollout, response_mask=mask)
        kls = as_floats(off_policy(dense_logps, rollout.rollout_logps, short.response_mask))
        found[str(length)] = {**row, "kl": kls["kl"], "k3_kl": kls["k3_kl"]}
    return found


def first_tokens(response_mask: Bool[Tensor, "batch seq"], n: int) -> Bool[Tensor, "batch seq"]:
    """Return the mask of the first n response tokens of each row."""
    return response_mask & (response_mask.cumsum(dim=1) <= n)
