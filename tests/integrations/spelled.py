"""Turns that are spelled out: a sampler that is forced to call tools, at the log-probs that it really has."""

from collections.abc import Sequence

import pytest
import torch

from lit_rlkv.kernels.token_logps import tempered
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.rollout import decoder as decoding
from tests.chat_templates import trl_tokenizer
from tests.integrations.trl_runs import EVICTS

END = "<|im_end|>"
EVICTING = {**EVICTS, "cache_budget": 48, "cache_interval": 8, "cache_window": 4}
"""Less than the prompt, than most turns and than the longest results."""


def call(name: str, **arguments: object) -> str:
    """Return a turn of Qwen's that calls a tool."""
    shown = ", ".join(f'"{key}": {value!r}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{shown}}}}}\n</tool_call>{END}'


def chat_model(folder):
    """Save a model whose attention is far from uniform; return its folder."""
    tokenizer = trl_tokenizer("qwen3", END)
    torch.manual_seed(0)
    model = tiny_qwen3(
        len(tokenizer),
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=2048,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return str(folder)


class Spelling:
    """Takes the draws of the sampler, so that each row spells its turns; the log-probs are the model's.

    Args:
        turns: turns of each row of a rollout, which end with END.
    """

    def __init__(self, patch: pytest.MonkeyPatch, turns: Sequence[Sequence[str]]) -> None:
        tokenizer = trl_tokenizer("qwen3", END)
        self._ids = [tokenizer.encode("".join(row), add_special_tokens=False) for row in turns]
        self._sample, self._append = decoding.sample, decoding.Decoder._append
        self._next = torch.zeros(0, dtype=torch.long)
        patch.setattr(decoding, "sample", self.sample)
        patch.setattr(decoding.Decoder, "_append", lambda *given: self.append(*given))

    def append(self, decoder, rows, logits):
        n_sampled = decoder.response_mask[rows, :-1].sum(dim=1).tolist()
        ids = [self._ids[row] for row in rows.tolist()]
        self._next = torch.tensor(
            [own[n] if n < len(own) else 0 for own, n in zip(ids, n_sampled, strict=True)]
        )
        self._append(decoder, rows, logits)

    def sample(self, logits, sampling, generator, noise_rows=None):
        _, _, kept = self._sample(logits, sampling, generator, noise_rows)
        logits, ids = tempered(logits.float(), sampling.temperature), self._next[:, None]
        if kept is not None:  # the ids of top_k, of which the first gives way
            kept[:, :1] = torch.where((kept == ids).any(dim=1, keepdim=True), kept[:, :1], ids.int())
            is_kept = torch.zeros_like(logits).scatter(1, kept.long().clamp(min=0), (kept >= 0).float())
            logits = logits.masked_fill(is_kept == 0, -torch.inf)
        return self._next, logits.log_softmax(-1).gather(1, ids).squeeze(1), kept
