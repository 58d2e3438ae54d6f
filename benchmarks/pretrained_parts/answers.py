"""Cells of prompts: task accuracy, and the dense model's response under an evicting cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from pretrained_parts import prompts as texts
from pretrained_parts.forced import Compared, Reference, compare, reference_of
from pretrained_parts.prefills import StoredPrefills
from pretrained_parts.setting import Cell
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv import Rollout, generate
from lit_rlkv.rng import stream
from lit_rlkv.types import PromptBatch

POSITIONS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Edges of the bins of response positions; a bin holds positions from its edge up to the next one."""


@dataclass(frozen=True)
class Prompts:
    """A chunk of prompts of one kind, with the responses of the model with all keys."""

    examples: list[texts.Example]
    """Empty for chats, which have no right answer."""
    reference: Reference
    dense: Rollout


class Answers:
    """Measures cells of prompts; keeps the prompts and prefills of the latest chunk."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, history_tokens: int
    ) -> None:
        self.model, self.tokenizer, self.history_tokens = model, tokenizer, history_tokens
        self.prefills = StoredPrefills(model)
        self.latest: tuple[tuple, Prompts] | None = None
        newline = tokenizer("\n", add_special_tokens=False).input_ids[0]
        self.line_ends = torch.tensor([newline, tokenizer.eos_token_id])
        self.turn_ends = torch.tensor([tokenizer.eos_token_id])

    def measure(self, cell: Cell) -> dict:
        """Return the results of one cell."""
        prompts = self._prompts_of(cell)
        reference = prompts.reference
        with self.prefills.active():
            found = compare(self.model, reference, cell.cache, draws_of(cell))
            right = None
            if prompts.examples:
                responses = self._greedy(reference.prompts, cell, reference.eos_token_ids)
                right = self._graded(prompts.examples, responses)
        n_prompt_tokens = reference.prompts.attention_mask.sum(dim=1)
        return {
            "right": right,
            "n_prompt_tokens": n_prompt_tokens.tolist(),
            **summary(found, reference.is_token),
            "kv_bytes": found.kv_bytes,
            "decode_seconds": found.decode_seconds,
            "n_decoded": reference.tokens.shape[0] * (reference.tokens.shape[1] - 1),
        }

    def _prompts_of(self, cell: Cell) -> Prompts:
        name = (cell.block, cell.chunk, cell.rows, cell.tokens)
        if self.latest is None or self.latest[0] != name:
            self.latest = name, self._make(cell)
        return self.latest[1]

    def _make(self, cell: Cell) -> Prompts:
        numbers = range(cell.chunk * cell.rows, (cell.chunk + 1) * cell.rows)
        examples, ends = [], self.turn_ends
        if cell.block == "chat":
            written = self._chats(numbers)
        else:
            make = {"recall": texts.recall, "few_shot": texts.few_shot}[cell.block]
            examples, ends = make(numbers.stop)[numbers.start :], self.line_ends
            written = [example.prompt for example in examples]
        batch = self._encode(written)
        dense = self._greedy(batch, Cell(cell.block, "dense", None, tokens=cell.tokens), ends)
        return Prompts(examples, reference_of(self.model, batch, dense, ends), dense)

    def _chats(self, numbers: range) -> list[str]:
        """Return chats whose earlier replies are the model's own, up to the last message of the user."""
        chats: list[list[dict[str, str]]] = [[] for _ in numbers]
        written: list[str] = []
        for turn in range(texts.N_TURNS):
            for chat, number in zip(chats, numbers, strict=True):
                chat.append({"role": "user", "content": texts.chat_turns(number)[turn]})
            written = [
                self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                for chat in chats
            ]
            if turn < texts.N_TURNS - 1:
                cell = Cell("chat", "dense", None, tokens=self.history_tokens)
                replies = self._decoded(self._greedy(self._encode(written), cell, self.turn_ends))
                for chat, reply in zip(chats, replies, strict=True):
                    whole = reply[: reply.rfind(".") + 1] or reply
                    chat.append({"role": "assistant", "content": whole})
        return written

    def _encode(self, written: list[str]) -> PromptBatch:
        found = self.tokenizer(written, return_tensors="pt", padding=True, padding_side="left")
        return PromptBatch(found.input_ids, found.attention_mask.bool())

    def _greedy(self, batch: PromptBatch, cell: Cell, ends: Int[Tensor, " eos"]) -> Rollout:
        return generate(
            self.model,
            batch.input_ids,
            batch.attention_mask,
            cache=cell.cache,
            max_new_tokens=cell.tokens,
            eos_token_id=ends.tolist(),
            pad_token_id=self.tokenizer.eos_token_id,
            temperature=0.0,
            generator=draws_of(cell),
        )

    def _decoded(self, rollout: Rollout) -> list[str]:
        rows = zip(rollout.input_ids, rollout.response_mask, strict=True)
        exact = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return [self.tokenizer.decode(row[mask], **exact) for row, mask in rows]

    def _graded(self, examples: list[texts.Example], rollout: Rollout) -> list[int]:
        pairs = zip(examples, self._decoded(rollout), strict=True)
        return [int(example.is_right(response)) for example, response in pairs]


def draws_of(cell: Cell) -> torch.Generator:
    """Return the random numbers of random eviction, the same for all policies and budgets."""
    return stream(0, "pretrained", cell.block, cell.chunk)


def summary(found: Compared, is_token: Tensor) -> dict:
    """Return sums over the response tokens, so that chunks can be added."""
    step = torch.arange(is_token.shape[1]).expand_as(is_token)[is_token]
    place = torch.bucketize(step, torch.tensor(POSITIONS), right=True) - 1
    bins = torch.zeros(len(POSITIONS), dtype=torch.float64)
    kl = found.kl[is_token].double()
    return {
        "n_tokens": len(step),
        "nll": -found.logps[is_token].double().sum().item(),
        "dense_nll": -found.dense_logps[is_token].double().sum().item(),
        "n_top": int(found.is_top[is_token].sum()),
        "n_by_prompt": is_token.sum(dim=1).tolist(),
        "kl_by_prompt": found.kl.masked_fill(~is_token, 0.0).double().sum(dim=1).tolist(),
        "kl": bins.scatter_add(0, place, kl).tolist(),
        "kl_n": bins.scatter_add(0, place, torch.ones_like(kl)).int().tolist(),
        "overlap": [round(value, 4) for value in found.overlap[is_token].tolist()],
    }


def timed(measure: Callable[[Cell], dict], cell: Cell) -> dict:
    """Return the results of a cell with the seconds that it took."""
    started_at = time.perf_counter()
    return {**measure(cell), "seconds": time.perf_counter() - started_at}
