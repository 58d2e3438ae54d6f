"""Given responses under an evicting cache, beside the model with all keys."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from pretrained_parts.prefills import StoredPrefills
from ranking_parts.setting import INTERVAL, Cell, cache_of, row_bytes
from ranking_parts.texts import RECALLS, SEGMENTS, TEXT, Texts, Writer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import head_logits
from lit_rlkv.rng import stream
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.settings import Sampling

EDGES = (1, 17, 33, 65, 97, 129, 161, 193)
"""Edges of the bins of response tokens, counted from 0; token 0 is predicted with all keys and left out."""
N_BINS = 100
"""Bins of the overlap, from 0 to 1."""


class GivenDecoder(Decoder):
    """Reads given responses, as many tokens in a forward as a cache decodes between two evictions."""

    tokens: Int[Tensor, "row step"]
    n_read = 0

    def _append(self, rows: Int[Tensor, " row"], logits: Float[Tensor, "row vocab"]) -> None:
        wanted = self.tokens[rows, self.n_read]
        # At temperature 0 the token of the highest logit is taken.
        super()._append(rows, torch.zeros_like(logits).scatter_(1, wanted[:, None], 1.0))


@torch.no_grad()
def hidden_of(
    model: PreTrainedModel, texts: Texts, cache: CacheSpec, generator: torch.Generator
) -> Iterator[Float[Tensor, "row chunk dim"]]:
    """Yield the hidden states that predict response tokens 1, 2, ..., `INTERVAL` tokens at a time.

    The cache is cut back when it would be if the tokens were decoded one by one, and sees the same queries,
    so every hidden state is that of a decode step.
    """
    n_rows, n_steps = texts.tokens.shape
    columns = texts.prompts.input_ids.shape[1]
    settings = DecodeSettings(n_steps + 2, torch.tensor([], dtype=torch.long), 0, Sampling(0.0))
    decoder = GivenDecoder(model, cache, n_rows, columns, settings, generator, cuda_graph=False)
    decoder.tokens, read = texts.tokens, []
    watch = model.base_model.register_forward_hook(lambda *found: read.append(found[-1].last_hidden_state))
    try:
        decoder.prefill(range(n_rows), texts.prompts.input_ids, texts.prompts.attention_mask)
        for start in range(0, n_steps - 1, INTERVAL):
            decoder.n_read = min(start + INTERVAL, n_steps - 1)
            given = texts.tokens[:, start + 1 : decoder.n_read]
            decoder.feed(range(n_rows), given, torch.ones_like(given, dtype=torch.bool))
            yield read[-1][:, -(decoder.n_read - start) :]
    finally:
        watch.remove()


@dataclass(frozen=True)
class Compared:
    """Statistics of the response tokens from number 1 on."""

    logps: Float[Tensor, "row step"]
    kl: Float[Tensor, "row step"]
    """KL(π ‖ μ) in nats: π sees all keys, μ the cached ones."""
    reverse_kl: Float[Tensor, "row step"]
    overlap: Float[Tensor, "row step"]
    is_top: Bool[Tensor, "row step"]


def compare(
    dense: Float[Tensor, "row step vocab"],
    logits: Float[Tensor, "row step vocab"],
    tokens: Int[Tensor, "row step"],
) -> Compared:
    """Compare distributions with those of the model with all keys.

    Args:
        dense: log-probs.
    """
    logps = logits.log_softmax(-1)
    probs, difference = dense.exp(), dense - logps
    kl = (probs * difference).sum(-1)
    own = logps.exp()
    reverse = -(own * difference).sum(-1)
    overlap = torch.minimum(probs, own).sum(-1)
    return Compared(
        logps.gather(-1, tokens[..., None])[..., 0], kl, reverse, overlap, logps.argmax(-1) == tokens
    )


class Measurer:
    """Measures cells; keeps texts, dense log-probs and prefills of the latest chunk."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.writer = model, Writer(model, tokenizer)
        self.prefills = StoredPrefills(model)
        self.latest: tuple[tuple[int, int, int], Texts, Tensor] | None = None

    @torch.no_grad()
    def measure(self, cell: Cell) -> dict:
        """Return the results of one cell."""
        started_at = time.process_time()
        texts, dense = self._texts_of(cell)
        n_prompt = texts.prompts.attention_mask.sum(dim=1)
        cache, parts, first = cache_of(cell, self.model, int(n_prompt.max())), [], 0
        for hidden in self._hidden(texts, cache, cell.chunk):
            last = first + hidden.shape[1]
            tokens = texts.tokens[:, 1 + first : 1 + last]
            parts.append(compare(dense[:, first:last], head_logits(self.model, hidden), tokens))
            first = last
        found = Compared(
            *(torch.cat(each, dim=1) for each in zip(*(vars(p).values() for p in parts), strict=True))
        )
        return {
            "budget": None if cell.slots is None else cache.budget,
            "n_prompt_tokens": n_prompt.tolist(),
            "bytes": row_bytes(cache, self.model, int(n_prompt.max()), cell.tokens),
            **summary(found, texts),
            "cpu_seconds": time.process_time() - started_at,
        }

    def _hidden(self, texts: Texts, cache: CacheSpec, chunk: int) -> Iterator[Tensor]:
        with self.prefills.active():
            yield from hidden_of(self.model, texts, cache, stream(0, "ranking", "evictions", chunk))

    def _texts_of(self, cell: Cell) -> tuple[Texts, Tensor]:
        name = (cell.chunk, cell.rows, cell.tokens)
        if self.latest is None or self.latest[0] != name:
            self.latest = None  # frees the log-probs of another chunk
            texts = self.writer.write(*name)
            parts = [
                head_logits(self.model, h).log_softmax(-1) for h in self._hidden(texts, CacheSpec.dense(), 0)
            ]
            self.latest = name, texts, torch.cat(parts, dim=1)
        return self.latest[1:]


def summary(found: Compared, texts: Texts) -> dict:
    """Return the statistics by prompt, by part of the response, and along it."""
    segment, answer = texts.segment[:, 1:], texts.answer[:, 1:]
    step = torch.arange(1, texts.tokens.shape[1]).repeat(len(segment), 1)
    place = torch.bucketize(step, torch.tensor(EDGES), right=True) - 1
    return {
        "kl": {name: _means(found.kl, segment == number) for number, name in enumerate(SEGMENTS)},
        "kl_all": _means(found.kl, step > 0),
        "reverse_kl": {TEXT: _means(found.reverse_kl, segment == SEGMENTS.index(TEXT))},
        "nll": {TEXT: _means(-found.logps, segment == SEGMENTS.index(TEXT))},
        "recall": {name: _recalls(found, segment == SEGMENTS.index(name), answer) for name in RECALLS},
        "along": {
            "kl": [_mean(found.kl, place == bin_) for bin_ in range(len(EDGES))],
            "p05": [_p05(found.overlap, place == bin_) for bin_ in range(len(EDGES))],
        },
        "overlap": torch.histc(found.overlap.clamp(0, 1), N_BINS, 0, 1).int().tolist(),
    }


def _means(values: Tensor, where: Bool[Tensor, "row step"]) -> list[float]:
    """Return the mean of each row over its tokens."""
    sums = values.double().masked_fill(~where, 0.0).sum(dim=1)
    return [round(one, 6) for one in (sums / where.sum(dim=1)).tolist()]


def _mean(values: Tensor, where: Bool[Tensor, "row step"]) -> float | None:
    return round(values[where].double().mean().item(), 6) if where.any() else None


def _p05(values: Tensor, where: Bool[Tensor, "row step"]) -> float | None:
    return round(values[where].quantile(0.05).item(), 4) if where.any() else None


def _recalls(found: Compared, where: Bool[Tensor, "row step"], answer: Tensor) -> dict[str, list]:
    """Return, for the values of each row, whether all their tokens are the top ones, and the log-prob."""
    right, logps = [], []
    for row in range(len(answer)):
        masks = [where[row] & (answer[row] == n) for n in answer[row][where[row]].unique().tolist()]
        right.append([int(found.is_top[row][mask].all()) for mask in masks])
        logps.append([round(found.logps[row][mask].sum().item(), 4) for mask in masks])
    return {"right": right, "logps": logps}
