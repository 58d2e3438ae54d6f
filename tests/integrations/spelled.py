"""Turns that are spelled out: a sampler that is forced to call tools, at the log-probs that it really has."""

import json
from collections.abc import Sequence

import pytest
import torch

from lit_rlkv.integrations.trl import EvictingGRPOTrainer
from lit_rlkv.kernels.token_logps import tempered
from lit_rlkv.rollout import decoder as decoding
from tests.chat_templates import trl_tokenizer
from tests.integrations.trl_runs import EVICTS, build, save_model

END = "<|im_end|>"
EVICTING = {**EVICTS, "cache_budget": 48, "cache_interval": 8, "cache_window": 4}
"""Less than the prompt, than most turns and than the longest results."""


def chat_tokenizer():
    return trl_tokenizer("qwen3", END)


def call(name: str, **arguments: object) -> str:
    """Return a turn of Qwen's that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"


def chat_model(folder):
    """Save a model for the tokens of Qwen's template; return its folder."""
    return save_model(folder, vocabulary=chat_tokenizer())


class Spelling:
    """Takes the draws of the sampler, so that each row spells its turns; the log-probs are the model's.

    Args:
        turns: turns of each row of a rollout, which end with END.
    """

    def __init__(self, patch: pytest.MonkeyPatch, turns: Sequence[Sequence[str]]) -> None:
        tokenizer = chat_tokenizer()
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


LONG = 330
"""Tokens of a completion at most."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def repeat(text: str, times: int) -> str:
    """Repeat a text.

    Args:
        text: the text.
        times: how often.
    """
    return text * times


ADD, REPEAT = call("add", a=2, b=3), call("repeat", text="ab", times=30)
TOO_LONG = call("repeat", text="ab", times=500)
TURNS = [
    [f"none at all{END}"],
    [ADD, f"it is 5{END}"],
    [ADD, REPEAT, f"that is it{END}"],
    [TOO_LONG],
    [ADD, f"it is 5{END}"],
    [call("unknown", a=1), f"oh{END}"],
    [REPEAT, ADD, "x" * LONG],  # which ends at the limit
    [TOO_LONG],
]
RESULTS = [
    [],
    ["5"],
    ["5", "ab" * 30],
    [],
    ["5"],
    ["{'error': 'Tool unknown not found.'}"],
    ["ab" * 30, "5"],
    [],
]


def score(completions, **_):
    """A reward that differs within a group."""
    return [float(len(str(completion)) % 97) for completion in completions]


def train_with_tools(model, folder, **options):
    """Train for a step on 4 completions to each of 2 chats; return the trainer and its logs."""
    trainer = build_with_tools(model, folder, **options)
    trainer.train()
    return trainer, [row for row in trainer.state.log_history if "loss" in row]


def build_with_tools(model, folder, *, arguments=None, **options):
    """Return a trainer with the tools above, or others."""
    arguments = arguments or {}
    tools = {} if "environment_factory" in arguments else {"tools": [add, repeat]}
    is_ours = issubclass(options.get("trainer", EvictingGRPOTrainer), EvictingGRPOTrainer)
    defaults = {
        "max_steps": 1,
        "max_completion_length": LONG,
        "learning_rate": 1e-3,
        "shuffle_dataset": False,
    }
    return build(
        model,
        folder,
        reward=score,
        arguments={**tools, **arguments},
        vocabulary=chat_tokenizer(),
        prompts=[[{"role": "user", "content": text}] for text in ("2+3?", "repeat it")],
        **{**defaults, **(EVICTING if is_ours else {}), **options},
    )
