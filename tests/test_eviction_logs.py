"""Eviction times from kept positions, slots and rules, against lists of what is cached at each query."""

from functools import partial

import pytest
import torch

from lit_rlkv.eviction_logs import from_kept, from_rule, from_seed, from_slots
from lit_rlkv.models.backbone import layer_kinds
from lit_rlkv.models.preparation import prepare_backbone
from lit_rlkv.types import NEVER
from tests.models.test_hybrids import hybrid
from tests.models.test_sliding_windows import windowed
from tests.models_zoo import tiny_model
from tests.rollouts import roll_out, spec_of

A, B = torch.tensor([[0, 2], [1, 3]]), torch.tensor([[0, 5], [4, 3]])


def test_kept_positions_give_the_next_query_as_the_time_of_all_others():
    times = from_kept(8, [(4, A), (6, B)])
    assert times.tolist() == [
        [NEVER, 4, 6, 4, 6, NEVER, NEVER, NEVER],
        [4, 6, 4, NEVER, NEVER, 6, NEVER, NEVER],
    ]


def test_ordinals_count_the_cache_as_the_last_compaction_left_it():
    # After A the heads hold 0 2 | 4 5 and 1 3 | 4 5, so places 0 3 and 2 1 are the keys 0 5 and 4 3 of B.
    places = torch.tensor([[0, 3], [2, 1]])
    assert torch.equal(from_kept(8, [(4, A), (6, places)], ordinals=True), from_kept(8, [(4, A), (6, B)]))


def test_heads_may_keep_different_numbers_of_keys():
    first, second = torch.tensor([[0, -1], [3, 1]]), torch.tensor([[1, -1], [0, 3]])
    times = from_kept(6, [(4, first), (6, second)], ordinals=True)
    # The first head holds 0 | 4 5, of which place 1 is key 4; the second 3 1 | 4 5, so it keeps 3 and 5.
    assert times.tolist() == [[6, 4, 4, 4, NEVER, 6], [4, 6, 4, NEVER, 6, NEVER]]


@pytest.mark.parametrize(
    ("compactions", "ordinals", "reason"),
    [
        (
            [(4, A), (6, torch.tensor([[0, 1], [1, 3]]))],
            False,
            r"6: key 1 is kept after .* at \[0\] of \[2\]",
        ),
        ([(4, A), (6, torch.tensor([[0, 6], [1, 3]]))], False, "6: key 6 is kept before it was written"),
        ([(4, A), (6, torch.tensor([[0, 2], [3, 3]]))], False, r"key 3 is kept twice, at \[1\]"),
        ([(4, A), (6, torch.tensor([[0, 4], [1, 3]]))], True, "key 4 is kept, and the cache has fewer"),
        ([(4, A), (4, A)], False, "rising positions up to 8"),
        ([(9, A)], False, "rising positions up to 8"),
        ([(4, A), (6, B[:1])], False, r"of \[2\] layers and heads, got \[1\]"),
        ([(4, A.float())], False, "must be whole numbers, got torch.float32"),
    ],
)
def test_a_compaction_that_cannot_be_is_refused(compactions, ordinals, reason):
    with pytest.raises(ValueError, match=reason):
        from_kept(8, compactions, ordinals=ordinals)


def cached_by_slots(slots, length, chunks, grace):
    """The keys of each query of a cache of slots whose last `grace` are a ring, token by token."""
    holds, ring, cached, start = list(range(length - grace)), list(range(length - grace, length)), {}, 0
    for size in chunks:
        for token in range(start, start + size):
            if token >= length:
                ring.append(token)
                holds[slots[token - length]] = ring.pop(0)
        for query in range(start, start + size):
            cached[query] = {key for key in holds + ring if key <= query}
        start += size
    return cached


@pytest.mark.parametrize("grace", [0, 2])
@pytest.mark.parametrize("chunks", [[5, 1, 1, 1, 1, 1, 1], [2, 3, 2, 2, 2], [5, 3, 3], [3, 2, 3, 1, 2]])
@pytest.mark.parametrize("n_tokens", [11, 12])
def test_overwritten_slots_give_the_first_query_of_the_forward(grace, chunks, n_tokens):
    generator, slots = torch.Generator().manual_seed(0), []
    for size in chunks[[sum(chunks[: i + 1]) for i in range(len(chunks))].index(5) + 1 :]:
        slots += torch.randperm(5 - grace, generator=generator)[:size].tolist()
    times = from_slots(n_tokens, torch.tensor([[slots]]), cache_length=5, chunks=chunks, grace_period=grace)
    for query, keys in cached_by_slots(slots, 5, chunks, grace).items():
        found = {key for key in range(query + 1) if times[0, 0, key] > query}
        assert found == keys, query


@pytest.mark.parametrize(
    ("slots", "options", "reason"),
    [
        ([0, 5, 1], {}, "slot 5 is none of 0 to 3"),
        ([0, 1, 1], {"chunks": [4, 1, 2]}, "slot 1 is taken twice by tokens 5 to 6"),
        ([0, 1], {}, "of the 8 tokens or all but the last"),
        ([0, 1, 2], {"chunks": [3, 4]}, "end as the cache is full"),
        ([0, 3, 1], {"grace_period": 1}, "slot 3 is none of 0 to 2"),
    ],
)
def test_slots_that_cannot_be_are_refused(slots, options, reason):
    with pytest.raises(ValueError, match=reason):
        from_slots(8, torch.tensor(slots), cache_length=4, **options)


def test_a_rule_of_latest_keys_is_a_sliding_window_with_sinks():
    assert from_rule(6, last=2, sink=1).tolist() == [[[NEVER, 3, 4, 5, NEVER, NEVER]]]


def test_a_rule_with_compactions_keeps_the_latest_keys_before_each():
    assert from_rule(9, last=2, sink=1, compactions=[4, 7]).tolist() == [
        [[NEVER, 4, 7, 7, 7, NEVER, NEVER, NEVER, NEVER]]
    ]


SEEDED = {"policy_options": {"seed": 7}}


def times_of_rows(rollout):
    """Prompt length and times of each row, from its first token."""
    starts = rollout.response_mask.int().argmax(dim=1)
    for row, mask in enumerate(rollout.attention_mask):
        first, times = int(mask.int().argmax()), rollout.evicted_at[row]
        times = torch.where(times == NEVER, times, times - first)[..., first : first + int(mask.sum())]
        yield int(starts[row]) - first, times


def test_streaming_needs_no_table_because_its_rule_is_its_record():
    spec = spec_of("streaming")
    for n_prompt, times in times_of_rows(roll_out(cache=spec)):
        n = times.shape[-1]
        moments = range(n_prompt, n - 1, spec.interval)
        rule = from_rule(n, last=spec.budget - spec.sink, sink=spec.sink, compactions=moments)
        assert torch.equal(times, rule[0].expand_as(times))
        assert (times != NEVER).any()


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {}, {}),
        ("llama", {"protect_prompt": True}, {}),
        ("llama", {"budget_profile": "pyramid", "budget": 12}, {}),
        ("llama", {"dtype": "int8"}, {"prefill_chunk": 4}),
        ("llama", {}, {"max_new_tokens": 1}),
        ("windowed", {}, {}),
        ("hybrid", {}, {}),
    ],
)
@pytest.mark.parametrize("lens", [(15, 11, 6), (30, 21, 2)])
def test_a_seed_needs_no_table_because_seed_and_rule_are_the_record(family, changes, options, lens):
    spec = spec_of("random", **SEEDED, **changes)
    made = {"windowed": partial(windowed, "gemma3"), "hybrid": partial(hybrid, "qwen3_5")}
    model = prepare_backbone(made[family]()) if family in made else tiny_model(family)
    rollout = roll_out(model, spec, lens, **options)
    kinds = [kind for kind in layer_kinds(model) if kind.attends]
    windows = {number: kind.window for number, kind in enumerate(kinds) if kind.window is not None}
    for n_prompt, times in times_of_rows(rollout):
        n_layers, n_kv_heads, n = times.shape
        sizes = {"n_layers": n_layers, "n_kv_heads": n_kv_heads, "windows": windows}
        chunk = options.get("prefill_chunk")
        assert torch.equal(times, from_seed(n, n_prompt, spec, **sizes, prefill_chunk=chunk))
    other = from_seed(n, n_prompt, spec_of("random", policy_options={"seed": 8}, **changes), **sizes)
    assert not torch.equal(times, other) or options.get("max_new_tokens") == 1


@pytest.mark.parametrize("keys", [{"last": 0}, {"last": 2.5}, {"last": 2, "sink": -1}])
def test_a_rule_keeps_whole_numbers_of_keys(keys):
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        from_rule(10, **keys)


def test_only_a_seed_is_a_record():
    with pytest.raises(ValueError, match=r"random with a seed, got random 8\+3"):
        from_seed(30, 9, spec_of("random"), n_layers=1, n_kv_heads=1)
    with pytest.raises(ValueError, match="n_prompt must be"):
        from_seed(30, 0, spec_of("random", **SEEDED), n_layers=1, n_kv_heads=1)
