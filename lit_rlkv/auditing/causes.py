"""Causes of a gap between a sampler's log-probs and the learner's: each tried, with what it leaves."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

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
from lit_rlkv.types import NEVER, Record, Rollout

TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
TOP_PS, TOP_KS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99), (5, 10, 20, 40, 50, 100)
"""Settings that are tried in place of those that were given."""
N_SINKS, FEWEST_KEYS = 4, 16
"""First keys that a cache of the latest keys may keep, too, and the fewest latest ones that are tried."""
TOKENS_PER_PASS = 4096
"""Most tokens of a forward."""
EXPLAINS, ROUNDING, MAX_STEPS = 0.5, 3.0, 3
"""A cause explains the gap if it leaves at most this share of it; rounding, if the gap is at most so many
times the distance of the model in 16 bits from itself. Most causes that act together."""
EXACT = 1e-4
"""Mean gap in nats that needs no explanation: sums in another order."""

Logps = Float[Tensor, "row response"]


def readings(
    logits: Float[Tensor, "token vocab"], tokens: Int[Tensor, " token"], settings: Sequence[Sampling]
) -> tuple[Float[Tensor, " token"], ...]:
    """Return the log-probs of tokens for each setting; of one that is not drawn those before the cut."""
    chosen = logits.gather(-1, tokens[:, None])
    ordered = logits.sort(dim=-1).values if any(setting.is_restricted for setting in settings) else logits
    found = []
    for setting in settings:
        own, likely = tempered(chosen, setting.temperature), tempered(ordered, setting.temperature)
        logps = own - likely.logsumexp(dim=-1, keepdim=True)
        if setting.is_restricted:
            likely = likely[:, -(setting.top_k or likely.shape[-1]) :]
            is_kept = keeps(setting, likely)
            mass = likely.masked_fill(~is_kept, -torch.inf).logsumexp(dim=-1, keepdim=True)
            least = likely.masked_fill(~is_kept, torch.inf).amin(dim=-1, keepdim=True)
            logps = torch.where(own >= least, own - mass, logps)
        found.append(logps[:, 0])
    return tuple(found)


@dataclass(frozen=True)
class Origin:
    """How the sampler's log-probs may have come about; a cause changes one part."""

    sampling: Sampling
    prompt: tuple[int, int | None] = (0, None)
    """Start and end of the part of the prompt that the engine saw."""
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    """Tokens that its template wrote before and after them."""
    latest: int | None = None
    """Keys of its cache, besides the first."""
    record: Callable[[Record], Record] | None = None
    shadow: bool = True
    has_adapter: bool = True
    shift: int = 0
    is_greedy: bool = False


@dataclass(frozen=True)
class Trial:
    """The learner's log-probs, had the sampler's come about in another way."""

    cause: str
    """The end of "the sampler's log-probs are those ..."."""
    logps: Logps
    """NaN where it says nothing."""
    gap: float
    """Mean |log π − log μ| of a sampled token, in nats."""
    origin: Origin
    """With this cause, and all that were found before it."""


class Audit:
    """The log-probs of a learner for what another engine sampled.

    Args:
        model: prepared, with the adapter of the sampler.
        sampling: that of the log, as far as it is known.
        without_adapter: opens a context in which the model has no adapter; None: it never has one.
        on_pass: called after each forward over all rows, with how many are done and to do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[LogRow],
        sampling: Sampling,
        without_adapter: Callable[[], AbstractContextManager[None]] | None = None,
        on_pass: Callable[[int, int], None] = lambda n_done, n_total: None,
    ) -> None:
        self.model, self.rows, self.sampling = model, rows, sampling
        self._without_adapter, self._on_pass = without_adapter, on_pass
        self.rollout = Rollout.from_log(rows, temperature=sampling.temperature).to(model.device)
        self.has_record = any(row.evicted_at is not None for row in rows)
        self._n_response = max(len(row.response_ids) for row in rows)
        self.sampler: Logps = self.rollout.rollout_logps[:, -self._n_response :].float()
        self.is_sampled: Bool[Tensor, "row response"] = self.rollout.response_mask[:, -self._n_response :]

    @cached_property
    def own(self) -> Trial:
        """The log is as it says, and evictions are replayed."""
        (found,) = self._tried([("as logged", Origin(self.sampling))])
        return found

    @cached_property
    def trials(self) -> list[Trial]:
        """The causes that change a log-prob, what leaves least first; none if there is nothing to explain."""
        if self.own.gap <= EXACT:
            return []
        tried = self._tried(self._causes(Origin(self.sampling)))
        return [each for each in tried if not torch.allclose(each.logps, self.own.logps, atol=EXACT)]

    @cached_property
    def steps(self) -> list[Trial]:
        """The causes that explain the gap together, each on top of those before it."""
        steps: list[Trial] = []
        gap, trials = self.own.gap, self.trials
        while trials and trials[0].gap <= EXPLAINS * gap:
            steps.append(trials[0])
            gap = trials[0].gap
            if gap <= EXACT or len(steps) == MAX_STEPS:
                break
            trials = self._tried(self._causes(trials[0].origin))
        return steps

    @property
    def found(self) -> Trial | None:
        """The causes that explain the gap; None if none does, or if there is nothing to explain."""
        if self.steps:
            return replace(self.steps[-1], cause=", then ".join(each.cause for each in self.steps))
        if not self.trials:
            return None
        distance = (self.rounding.logps - self.own.logps).abs()[self.is_sampled].mean()
        return self.rounding if self.own.gap <= ROUNDING * float(distance) else None

    @property
    def grows(self) -> bool:
        """True if the gap of rows without a record is, in the first quarter, less than half of the rest."""
        rows = [place for place, row in enumerate(self.rows) if row.evicted_at is None]
        first, place = self._n_response // 4, torch.arange(self._n_response, device=self.sampler.device)
        is_sampled, distance = self.is_sampled[rows], (self.own.logps - self.sampler)[rows].abs()
        parts = [distance[is_sampled & is_part] for is_part in (place < first, place >= first)]
        return bool(parts[0].mean() < EXPLAINS * parts[1].mean())

    @cached_property
    def rounding(self) -> Trial:
        """The learner computes in bfloat16, as engines do, or if it does, in float32; the model stays so."""
        _ = self.own, self.steps  # before the model changes
        name = "float32" if self.model.dtype == torch.bfloat16 else "bfloat16"
        _ = self.model.float() if name == "float32" else self.model.bfloat16()
        (found,) = self._tried([(f"of the same model in {name}", Origin(self.sampling))])
        return found

    def _tried(self, causes: Iterable[tuple[str, Origin]]) -> list[Trial]:
        """Return the trials of causes, least gap first."""
        names, origins = zip(*causes, strict=True)
        trials = []
        for name, origin, logps in zip(names, origins, self._logps(origins), strict=True):
            gap = float((logps - self.sampler).abs()[self.is_sampled].nanmean())
            trials.append(Trial(name, logps, gap, origin))
        # A response of a single token cannot be shifted.
        return sorted((one for one in trials if not math.isnan(one.gap)), key=lambda one: one.gap)

    def _causes(self, origin: Origin) -> Iterator[tuple[str, Origin]]:
        """Yield each cause that changes an origin, and the changed one."""
        for cause, changes in self._changes(origin):
            changed = replace(origin, **changes)
            if changed != origin:
                yield cause, changed

    def _changes(self, origin: Origin) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each cause, and the parts of the origin that it changes; add a cause here."""
        given, (start, end) = origin.sampling, origin.prompt
        cause = "of the raw logits; vLLM has logprobs_mode=processed_logprobs"
        yield cause, {"sampling": Sampling()}
        cause = "of all tokens, not of those that are drawn from alone"
        yield cause, {"sampling": Sampling(given.temperature)}
        for each in TEMPERATURES:
            cause = f"at temperature {each:g}, not {given.temperature:g}"
            yield cause, {"sampling": replace(given, temperature=each)}
        for each in TOP_PS:
            yield f"renormalised over top_p={each:g}", {"sampling": replace(given, top_p=each)}
        for n in TOP_KS:
            yield f"renormalised over top_k={n}", {"sampling": replace(given, top_k=n)}
        yield "of a greedy engine, which logs 0", {"is_greedy": True}
        yield "of the previous token: they are shifted by one", {"shift": 1}
        yield "of the next token: they are shifted by one", {"shift": -1}
        if self._without_adapter is not None:
            yield "of the model without its adapter", {"has_adapter": False}
        if self.has_record:
            yield from self._other_records()
            return
        if all(len(row.prompt_ids[start:end]) > 1 for row in self.rows):
            yield "of a prompt without its first token", {"prompt": (1, end)}
            yield "of a prompt without its last token", {"prompt": (start, -1)}
        for name in ("bos", "eos", "pad"):
            token = getattr(text_config(self.model), f"{name}_token_id", None)
            if isinstance(token, int) and token >= 0:
                yield f"of a prompt that begins with token {token} ({name})", {"first": (token,)}
                yield f"of a prompt that ends with token {token} ({name})", {"last": (token,)}
        latest = FEWEST_KEYS
        while latest < self.rollout.input_ids.shape[1] - N_SINKS:
            yield f"of a cache of the first {N_SINKS} and the latest {latest} keys", {"latest": latest}
            latest *= 2

    def _other_records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for steps, words in ((1, "longer"), (-1, "less")):
            cause = f"of queries that see evicted keys one step {words} than the record says"
            yield cause, {"record": partial(Record.delayed, by=steps)}
        for name, dim in (("KV head", 2), ("layer", 1)):
            yield f"of the {name}s in reverse order", {"record": _moved(torch.flip, [dim])}
            yield f"of the next {name}", {"record": _moved(torch.roll, 1, dim)}
        yield "of a cache with all keys: nothing was evicted", {"shadow": False}

    def _rollout(self, origin: Origin) -> Rollout:
        rows = self.rows
        if origin.prompt != (0, None) or origin.first or origin.last or origin.latest is not None:
            rows = [self._row(row, origin) for row in rows]
        rollout = Rollout.from_log(rows, temperature=self.sampling.temperature).to(self.model.device)
        return rollout if origin.record is None else replace(rollout, record=origin.record(rollout.record))

    def _row(self, row: LogRow, origin: Origin) -> LogRow:
        parts = (torch.tensor(origin.first), row.prompt_ids[slice(*origin.prompt)], torch.tensor(origin.last))
        prompt = torch.cat([part.long() for part in parts])
        n_tokens, latest = len(prompt) + len(row.response_ids), origin.latest
        times = None if latest is None else from_rule(n_tokens, last=latest, sink=N_SINKS)
        return replace(row, prompt_ids=prompt, evicted_at=times)

    def _logps(self, origins: Sequence[Origin]) -> list[Logps]:
        """Return the log-probs of each origin; those that differ in what is read share a forward."""
        passes_of: dict[int, list[int]] = {}
        seen = [replace(each, sampling=self.sampling, shift=0, is_greedy=False) for each in origins]
        for place, each in enumerate(seen):
            passes_of.setdefault(seen.index(each), []).append(place)
        found: dict[int, Logps] = {}
        for n_done, places in enumerate(passes_of.values(), 1):
            settings = [origins[place].sampling for place in places]
            for place, logps in zip(places, self._read(origins[places[0]], settings), strict=True):
                found[place] = self._as_logged(logps, origins[place])
            self._on_pass(n_done, len(passes_of))
        return [found[place] for place in range(len(origins))]

    def _as_logged(self, logps: Logps, origin: Origin) -> Logps:
        if origin.is_greedy:
            return torch.zeros_like(logps)
        if not origin.shift:
            return logps
        is_there = self.is_sampled & self.is_sampled.roll(origin.shift, dims=1)
        is_there[:, 0 if origin.shift > 0 else -1] = False
        return logps.roll(origin.shift, dims=1).masked_fill(~is_there, torch.nan)

    @torch.no_grad()
    def _read(self, origin: Origin, settings: Sequence[Sampling]) -> list[Logps]:
        """Return the learner's log-probs of the responses for each setting."""
        rollout = self._rollout(origin)
        without = None if origin.has_adapter else self._without_adapter
        found = [torch.zeros_like(rollout.rollout_logps, dtype=torch.float32) for _ in settings]

        def read(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            return readings(head_logits(self.model, states), tokens, settings)

        size = max(MAX_CHUNK_LOGITS // text_config(self.model).vocab_size, 1)
        with nullcontext() if without is None else without():
            for rows, part in passes(rollout, TOKENS_PER_PASS):
                hidden = response_hidden(self.model, part, shadow=origin.shadow)
                tokens = part.input_ids[part.response_mask]
                chunks = in_chunks(read, hidden, tokens, size=size, stores_gradients=False)
                for out, each in zip(found, chunks, strict=True):
                    out[rows] = unpacked(scatter_to_response(part, each), rollout.attention_mask, rows)
        return [logps[:, -self._n_response :] for logps in found]


def _moved(move: Callable[..., Tensor], *arguments: Any) -> Callable[[Record], Record]:
    return lambda record: replace(record, evicted_at=move(record.evicted_at, *arguments))


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
