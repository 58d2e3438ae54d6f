import pytest

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.fill_levels import FillLevels


def spec_of(budget: int, interval: int) -> CacheSpec:
    return CacheSpec(policy="streaming", budget=budget, interval=interval, sink=1, window=2)


def started(spec: CacheSpec, lens: list[int], n_slots: int | None = None) -> FillLevels:
    levels = FillLevels(spec, len(lens), [n_slots or spec.budget + spec.interval], [spec.budget])
    levels.start(range(len(lens)), lens)
    return levels


def test_levels_of_ragged_prompts_match_a_worked_example():
    # Budget 4, interval 2: after every second step a row above 4 keys falls back to 4. The prompt of 7 was
    # compacted to 4 at prefill, that of 4 fits exactly, and that of 1 exceeds the budget in the fourth step.
    levels = started(spec_of(4, 2), [1, 4, 7])
    seen = [(levels.step(), levels.level[0].tolist()) for _ in range(4)]
    assert seen == [
        (False, [2, 5, 5]),
        (True, [3, 4, 4]),
        (False, [4, 5, 5]),
        (True, [4, 4, 4]),
    ]


def test_rows_that_start_later_keep_the_clock_of_their_own_start():
    levels = started(spec_of(4, 3), [4, 4])
    seen = [levels.step()]
    levels.start([1], [4])
    seen += [levels.step() for _ in range(6)]
    # Row 0 is due in steps 3 and 6, row 1 in steps 4 and 7.
    assert [step + 1 for step, is_due in enumerate(seen) if is_due] == [3, 4, 6, 7]


def test_a_cache_with_slots_for_whole_sequences_within_its_budget_is_never_due():
    levels = started(spec_of(20, 2), [3, 9], n_slots=20)
    assert not any(levels.step() for _ in range(60))
    levels = started(spec_of(20, 2), [3, 9], n_slots=21)
    assert any(levels.step() for _ in range(60))


def test_a_dense_cache_is_never_full():
    levels = started(CacheSpec.dense(), [2, 5], n_slots=6)
    assert not any(levels.step() for _ in range(20))


def test_rows_that_stand_idle_ask_for_nothing_until_they_start_again():
    levels = started(spec_of(4, 2), [4, 4])
    levels.stop([0, 1])
    assert not any(levels.step() for _ in range(20))
    levels.start([1], [4])
    assert [levels.step() for _ in range(4)] == [False, True, False, True]


def dues_by_hand(spec: CacheSpec, prompt_len: int, n_steps: int) -> list[bool]:
    n_keys, dues = min(prompt_len, spec.budget), []
    for step in range(1, n_steps + 1):
        n_keys += 1
        dues.append(step % spec.interval == 0 and n_keys > spec.budget)
        n_keys = spec.budget if dues[-1] else n_keys
    return dues


@pytest.mark.parametrize("interval", [1, 2, 5, 8])
@pytest.mark.parametrize("lens", [[3], [6, 7, 19], list(range(1, 20))])
def test_some_row_is_due_exactly_when_one_counted_by_hand_is(interval: int, lens: list[int]):
    spec = spec_of(6, interval)
    levels = started(spec, lens)
    by_hand = [dues_by_hand(spec, length, 30) for length in lens]
    assert [levels.step() for _ in range(30)] == [any(step) for step in zip(*by_hand, strict=True)]
