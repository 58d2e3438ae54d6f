"""Causes of a gap between a sampler's log-probs and the learner's: each tried, with what it leaves."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.eviction_logs import from_rule
from lit_rlkv.kernels.token_logps import in_chunks, tempered
from lit_rlkv.kernels.token_logps.reference import MAX_CHUNK_LOGITS
from lit_rlkv.log_row import LogRow
from lit_rlkv.models.backbone import head_logits, text_config
from lit_rlkv.models.packing import passes, unpacked
from lit_rlkv.models.replay import response_hidden, scatter_to_response
from lit_rlkv.rollout.sampling import keeps
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER, Rollout

TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
TOP_PS, TOP_KS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99), (5, 10, 20, 40, 50, 100)
"""Settings that are tried in place of those that were given."""
N_SINKS, FEWEST_KEYS = 4, 16
"""First keys that a cache of the latest keys may keep, too, and the fewest latest ones that are tried."""
TOKENS_PER_PASS = 4096
"""Most tokens of a forward."""
EXPLAINS, ROUNDING = 0.5, 3.0
"""A cause explains the gap if it leaves at most this share of it; rounding, if the gap is at most so many
times the distance of the model in 16 bits from itself."""
EXACT = 1e-4
"""Mean gap in nats that needs no explanation: sums in another order."""

Logps = Float[Tensor, "row response"]


def readings(
    logits: Float[Tensor, "token vocab"], tokens: Int[Tensor, " token"], settings: Sequence[Sampling]
) -> tuple[Float[Tensor, " token"], ...]:
    """Return the log-probs of tokens for each setting; of one that is not drawn those before the cut."""
    found: dict[Sampling, Tensor] = {}
    for temperature in {setting.temperature for setting in settings}:
        logps = tempered(logits, temperature).log_softmax(dim=-1)
        own = logps.gather(-1, tokens[:, None])
        alike = [setting for setting in settings if setting.temperature == temperature]
        ordered = logps.sort(dim=-1).values if any(setting.is_restricted for setting in alike) else logps
        for setting in alike:
            found[setting] = own[:, 0]
            if setting.is_restricted:
                likely = ordered[:, -(setting.top_k or ordered.shape[-1]) :]
                is_kept = keeps(setting, likely)
                mass = likely.masked_fill(~is_kept, -torch.inf).logsumexp(dim=-1, keepdim=True)
                least = likely.masked_fill(~is_kept, torch.inf).amin(dim=-1, keepdim=True)
                found[setting] = torch.where(own >= least, own - mass, own)[:, 0]
    return tuple(found[setting] for setting in settings)


@dataclass(frozen=True)
class Trial:
    """The learner's log-probs, had the sampler's come about in another way."""

    cause: str
    """The end of "the sampler's log-probs are those ..."."""
    logps: Logps
    """NaN where it says nothing."""
    gap: float
    """Mean |log π − log μ| of a sampled token, in nats."""


class Audit:
    """The log-probs of a learner for what another engine sampled.

    Args:
        model: prepared, with the adapter of the sampler.
        sampling: that of the log, as far as it is known.
        without_adapter: `own` of the same audit of the model without its adapter; None: it has none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[LogRow],
        sampling: Sampling,
        without_adapter: Logps | None = None,
    ) -> None:
        self.model, self.rows, self.sampling = model, rows, sampling
        self.rollout = Rollout.from_log(rows, temperature=sampling.temperature).to(model.device)
        self.has_record = any(row.evicted_at is not None for row in rows)
        self._n_response = max(len(row.response_ids) for row in rows)
        self._without_adapter = without_adapter
        self.sampler: Logps = self.rollout.rollout_logps[:, -self._n_response :].float()
        self.is_sampled: Bool[Tensor, "row response"] = self.rollout.response_mask[:, -self._n_response :]

    @cached_property
    def own(self) -> Trial:
        """The log is as it says, and evictions are replayed."""
        return self._trial("as logged", *self._logps(self.rollout, [self.sampling]))

    @cached_property
    def trials(self) -> list[Trial]:
        """The causes that were tried, what leaves least first; none, if nothing has to be explained."""
        trials = [] if self.own.gap <= EXACT else self._trials()
        said = (trial for trial in trials if not math.isnan(trial.gap))  # a single token cannot be shifted
        return sorted(said, key=lambda trial: trial.gap)

    @property
    def found(self) -> Trial | None:
        """The cause that explains the gap; None if none does, or if there is nothing to explain."""
        if not self.trials:
            return None
        best = next(trial for trial in self.trials if trial is not self.rounding)
        if best.gap <= EXPLAINS * self.own.gap:
            return best
        return self.rounding if self.own.gap <= ROUNDING * self.rounding_size else None

    @property
    def grows(self) -> bool:
        """True if the gap is less in the first quarter of the responses than half of that in the rest."""
        first, place = self._n_response // 4, torch.arange(self._n_response, device=self.sampler.device)
        distance = (self.own.logps - self.sampler).abs()
        parts = [distance[self.is_sampled & is_part] for is_part in (place < first, place >= first)]
        return bool(parts[0].mean() < EXPLAINS * parts[1].mean())

    @property
    def rounding_size(self) -> float:
        """Mean distance of the model in 16 bits from itself in 32, in nats."""
        distance = (self.rounding.logps - self.own.logps).abs()[self.is_sampled]
        return float(distance.mean())

    @cached_property
    def rounding(self) -> Trial:
        """The learner computes in bfloat16, as engines do, or if it does, in float32; the model stays so."""
        _ = self.own  # before the model changes
        name = "float32" if self.model.dtype == torch.bfloat16 else "bfloat16"
        _ = self.model.float() if name == "float32" else self.model.bfloat16()
        return self._trial(f"of the same model in {name}", *self._logps(self.rollout, [self.sampling]))

    def _trials(self) -> Iterator[Trial]:
        yield from self._other_settings()
        yield self._trial("of a greedy engine, which logs 0", torch.zeros_like(self.sampler))
        for by, which in ((1, "previous"), (-1, "next")):
            moved = self.own.logps.roll(by, dims=1)
            is_there = self.is_sampled & self.is_sampled.roll(by, dims=1)
            is_there[:, 0 if by > 0 else -1] = False
            text = f"of the {which} token: they are shifted by one"
            yield self._trial(text, moved.masked_fill(~is_there, torch.nan))
        if self._without_adapter is not None:
            yield self._trial("of the model without its adapter", self._without_adapter)
        yield from self._other_records() if self.has_record else self._other_prompts_and_caches()
        yield self.rounding

    def _other_settings(self) -> Iterator[Trial]:
        given = self.sampling
        others = {"of the raw logits; vLLM has logprobs_mode=processed_logprobs": Sampling()}
        others["of all tokens, not of those that are drawn from alone"] = Sampling(given.temperature)
        for each in TEMPERATURES:
            others[f"at temperature {each:g}, not {given.temperature:g}"] = replace(given, temperature=each)
        for each in TOP_PS:
            others[f"renormalised over top_p={each:g}"] = replace(given, top_p=each)
        for each in TOP_KS:
            others[f"renormalised over top_k={each}"] = replace(given, top_k=each)
        others = {cause: setting for cause, setting in others.items() if setting != given}
        for cause, logps in zip(others, self._logps(self.rollout, [*others.values()]), strict=True):
            yield self._trial(cause, logps)

    def _other_records(self) -> Iterator[Trial]:
        record = self.rollout.record
        times = record.evicted_at
        others = {
            "of queries that see evicted keys one step longer than the record says": record.delayed(1),
            "of queries that see evicted keys one step less than the record says": record.delayed(-1),
            "of the KV heads in reverse order": replace(record, evicted_at=times.flip(2)),
            "of the next KV head": replace(record, evicted_at=times.roll(1, dims=2)),
            "of the layers in reverse order": replace(record, evicted_at=times.flip(1)),
            "of the next layer": replace(record, evicted_at=times.roll(1, dims=1)),
        }
        for cause, other in others.items():
            yield self._trial(cause, *self._logps(replace(self.rollout, record=other), [self.sampling]))
        cause = "of a cache with all keys: nothing was evicted"
        yield self._trial(cause, *self._logps(self.rollout, [self.sampling], shadow=False))

    def _other_prompts_and_caches(self) -> Iterator[Trial]:
        first = getattr(self.model.config, "bos_token_id", None)
        ways = {"without its first token": slice(1, None), "without its last token": slice(None, -1)}
        if all(len(row.prompt_ids) > 1 for row in self.rows):
            for cause, part in ways.items():
                yield self._of_rows(
                    f"of a prompt {cause}",
                    [replace(row, prompt_ids=row.prompt_ids[part]) for row in self.rows],
                )
        if isinstance(first, int):
            start = torch.tensor([first])
            yield self._of_rows(
                f"of a prompt that begins with token {first} (bos)",
                [replace(row, prompt_ids=torch.cat([start, row.prompt_ids])) for row in self.rows],
            )
        last = FEWEST_KEYS
        while last < self.rollout.input_ids.shape[1] - N_SINKS:
            yield self._of_rows(
                f"of a cache of the first {N_SINKS} and the latest {last} keys",
                [
                    replace(
                        row,
                        evicted_at=from_rule(
                            len(row.prompt_ids) + len(row.response_ids), last=last, sink=N_SINKS
                        ),
                    )
                    for row in self.rows
                ],
            )
            last *= 2

    def _of_rows(self, cause: str, rows: Sequence[LogRow]) -> Trial:
        rollout = Rollout.from_log(rows, temperature=self.sampling.temperature).to(self.model.device)
        return self._trial(cause, *self._logps(rollout, [self.sampling]))

    def _trial(self, cause: str, logps: Logps) -> Trial:
        distance = (logps - self.sampler).abs()[self.is_sampled]
        return Trial(cause, logps, float(distance.nanmean()))

    @torch.no_grad()
    def _logps(self, rollout: Rollout, settings: Sequence[Sampling], *, shadow: bool = True) -> list[Logps]:
        """Return the learner's log-probs of the responses for each setting."""
        found = [torch.zeros_like(rollout.rollout_logps, dtype=torch.float32) for _ in settings]

        def read(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            return readings(head_logits(self.model, states), tokens, settings)

        size = max(MAX_CHUNK_LOGITS // text_config(self.model).vocab_size, 1)
        for rows, part in passes(rollout, TOKENS_PER_PASS):
            hidden = response_hidden(self.model, part, shadow=shadow)
            tokens = part.input_ids[part.response_mask]
            chunks = in_chunks(read, hidden, tokens, size=size, stores_gradients=False)
            for out, each in zip(found, chunks, strict=True):
                out[rows] = unpacked(scatter_to_response(part, each), rollout.attention_mask, rows)
        return [logps[:, -self._n_response :] for logps in found]


def uneven_heads(row: LogRow) -> str | None:
    """Return where a KV head holds another number of keys than all others, as a key too many would."""
    if row.evicted_at is None:
        return None
    times = row.evicted_at
    position = torch.arange(times.shape[-1])
    for now in times[times != NEVER].unique().tolist():
        counts = ((position < now) & (times > now)).sum(dim=-1)
        usual = Counter(counts.flatten().tolist()).most_common(1)[0][0]
        if (counts != usual).sum() == 1:
            layer, head = (counts != usual).nonzero()[0].tolist()
            return (
                f"layer {layer}, KV head {head} holds {int(counts[layer, head])} keys at position {now}, "
                f"and all others {usual}"
            )
    return None
