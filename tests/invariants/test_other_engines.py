"""Logs of an engine of plain torch replay to float error, and faults planted in them do not pass."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from lit_rlkv import NEVER, LogRow, Rollout, eviction_delays, prepare_backbone
from lit_rlkv.eviction_logs import from_kept, from_slots
from tests.models_zoo import VOCAB, build, tiny_config
from tests.plain_engine import BUDGET, TEMPERATURE, Engine, Log
from tests.rollouts import gap

POLICIES = ("attention", "window", "random")
N_LAYERS, N_HEADS, N_NEW = 3, 2, 20
PROMPTS = (13, 4, 1)


@cache
def network(dtype):
    """The weights twice: as transformers built them, and prepared."""
    config = tiny_config("llama")
    return build(config).to(dtype), prepare_backbone(build(config).to(dtype))


@cache
def logs(policy, overwrites, dtype=torch.float32) -> list[Log]:
    engine = Engine(network(dtype)[0], policy, overwrites=overwrites)
    tokens = torch.randint(1, VOCAB, (max(PROMPTS),), generator=torch.Generator().manual_seed(1)).tolist()
    return [engine.run(tokens[:n], N_NEW) for n in PROMPTS]


def n_tokens(log: Log) -> int:
    return len(log.prompt) + len(log.response)


def by_times(log: Log) -> Tensor:
    times = torch.full((N_LAYERS, N_HEADS, n_tokens(log)), NEVER)
    for place, death in log.deaths.items():
        times[place] = death
    return times


def by_positions(log: Log) -> Tensor:
    return from_kept(n_tokens(log), [(now, kept) for now, kept, _ in log.kept])


def by_ordinals(log: Log) -> Tensor:
    return from_kept(n_tokens(log), [(now, kept) for now, _, kept in log.kept], ordinals=True)


def by_slots(log: Log) -> Tensor:
    return from_slots(n_tokens(log), torch.stack(log.slots, dim=-1), cache_length=BUDGET)


def row_of(log: Log, times: Tensor) -> LogRow:
    return LogRow(log.prompt, log.response, torch.tensor(log.logps, dtype=torch.float64), times)


def rollout_of(logs, times, temperature=TEMPERATURE) -> Rollout:
    return Rollout.from_log([row_of(log, times(log)) for log in logs], temperature=temperature)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("layout", [by_times, by_positions, by_ordinals, by_slots])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_log_of_another_engine_replays_to_float_error(policy, layout, dtype, tolerance):
    rollout = rollout_of(logs(policy, layout is by_slots, dtype), layout)
    model = network(dtype)[1]
    assert gap(model, rollout) < tolerance
    assert gap(model, rollout, shadow=False) > 0.1  # what it saw matters
    assert torch.equal(
        rollout.evicted_at, rollout_of(logs(policy, layout is by_slots, dtype), by_times).evicted_at
    )


def shifted_columns(log):
    """Times of the key before each, as if the engine counted a token that the log does not have."""
    times = by_positions(log)
    return torch.cat([times[..., :1], times[..., :-1]], dim=-1)


def one_key_too_many(log):
    """The first compaction keeps a key that the engine evicted there, and the next one evicts it."""
    (now, kept, _), *later = log.kept
    gone = by_positions(log)[..., :now].argmin(dim=-1, keepdim=True)  # of those evicted first
    return from_kept(n_tokens(log), [(now, torch.cat([kept, gone], dim=-1)), *((t, k) for t, k, _ in later)])


def changed_kept(log, number, change):
    kept = [(now, kept.clone()) for now, kept, _ in log.kept]
    change(kept[number][1], kept)
    return from_kept(n_tokens(log), kept)


def resurrected(log):
    def change(kept, compactions):
        kept[0, 0, 0] = next(key for key in range(1, 8) if key not in compactions[0][1][0, 0])

    return changed_kept(log, 2, change)


def in_the_future(log):
    return changed_kept(log, 1, lambda kept, compactions: kept[0, 0].fill_(compactions[1][0]))


def padding_counted(log):
    """Columns of a batch whose rows are left-padded to the longest prompt."""
    times = by_positions(log)
    return torch.where(times == NEVER, times, times - (max(PROMPTS) - len(log.prompt)))


def of_another_row(log):
    times = by_positions(logs("attention", False)[0])[..., : n_tokens(log)]
    return times.masked_fill(times > n_tokens(log), NEVER)


SEEN_IN_LOGPS = {
    "columns shifted by one": shifted_columns,
    "heads in another order": lambda log: by_positions(log).flip(1),
    "layers in another order": lambda log: by_positions(log).flip(0),
    "one key too many": one_key_too_many,
    "death one step late": lambda log: by_positions(log) + (by_positions(log) != NEVER).int(),
    "times of another row": of_another_row,
}


@pytest.mark.parametrize("fault", SEEN_IN_LOGPS)
def test_a_wrong_record_that_could_be_one_is_seen_in_the_logprobs(fault):
    rollout = rollout_of(logs("random", False), SEEN_IN_LOGPS[fault])
    gaps = eviction_delays(network(torch.float32)[1], rollout)
    if fault == "death one step late":
        assert gaps[-1] < 1e-5
        mended = replace(rollout, record=rollout.record.delayed(-1))
        assert gap(network(torch.float32)[1], mended) < 1e-5
    assert min(gap for delay, gap in gaps.items() if fault != "death one step late" or delay != -1) > 1e-2


def test_an_eviction_that_queries_feel_a_step_later_is_found():
    early = rollout_of(
        logs("attention", False), lambda log: by_positions(log) - (by_positions(log) < NEVER).int()
    )
    gaps = eviction_delays(network(torch.float32)[1], early)
    assert gaps[1] < 1e-5 < 1e-2 < min(gaps[0], gaps[-1])


REFUSED = {
    "a key kept after it was evicted": (resurrected, "key .* is kept after it was evicted"),
    "a key in the future": (in_the_future, "key .* is kept before it was written"),
    "padding counted": (padding_counted, "without padding"),
    "another number of tokens": (
        lambda log: by_positions(log)[..., 1:],
        r"of \d+ tokens, those of prompt and response",
    ),
    "no whole numbers": (lambda log: by_positions(log).float(), "whole numbers"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_record_that_can_be_none_is_refused(fault):
    times, reason = REFUSED[fault]
    with pytest.raises(ValueError, match=reason):
        rollout_of(logs("random", False), times)


@pytest.mark.parametrize("part", [{"prompt": (0, 3)}, {"response": (1, 1)}, {"temperature": 1.0}])
def test_other_tokens_or_another_temperature_are_seen_in_the_logprobs(part):
    rows = logs("random", False)
    if "temperature" not in part:
        (name, (place, token)) = next(iter(part.items()))
        changed = [*getattr(rows[0], name)]
        changed[place] = (changed[place] + token) % VOCAB
        rows = [replace(rows[0], **{name: changed}), *rows[1:]]
    rollout = rollout_of(rows, by_times, part.get("temperature", TEMPERATURE))
    assert min(eviction_delays(network(torch.float32)[1], rollout).values()) > 1e-2


@pytest.mark.parametrize("shape", [(N_LAYERS, 3), (N_LAYERS, 4), (2, N_HEADS), (N_LAYERS + 1, N_HEADS)])
def test_a_record_of_another_model_is_refused(shape):
    def times(log):
        return by_positions(log)[:1, :1].expand(*shape, -1)

    with pytest.raises(ValueError, match="for 3 layers and 2 KV heads"):
        gap(network(torch.float32)[1], rollout_of(logs("random", False), times))


def test_rows_of_different_engines_and_none_are_refused():
    log = logs("random", False)[0]
    few = by_positions(log)[:2]
    with pytest.raises(ValueError, match=r"equal layers and KV heads, got 2 rows of \[\(2, 2\), \(3, 2\)\]"):
        Rollout.from_log([row_of(log, by_positions(log)), row_of(log, few)])
    with pytest.raises(ValueError, match="at least one"):
        Rollout.from_log([])


def test_a_record_does_not_depend_on_the_rows_beside_it_and_a_row_without_one_is_dense():
    one, *others = logs("random", False)
    alone = Rollout.from_log([row_of(one, by_times(one))], temperature=TEMPERATURE)
    dense = LogRow(others[0].prompt, others[0].response, others[0].logps)
    both = Rollout.from_log([row_of(one, by_times(one)), dense], temperature=TEMPERATURE)
    model = network(torch.float32)[1]
    assert gap(model, both.rows(slice(1))) == pytest.approx(gap(model, alone), abs=1e-6)
    second = both.rows(slice(1, 2))
    assert gap(model, second) == pytest.approx(gap(model, second, shadow=False), abs=1e-6)
