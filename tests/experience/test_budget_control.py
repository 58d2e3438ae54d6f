from dataclasses import replace

from lit_rlkv.experience.budget_control import BudgetController
from lit_rlkv.kvcache import CacheSpec

CACHE = CacheSpec("snapkv", budget=100, interval=8, sink=1, window=3)


def budgets(overlaps: list[float], **options) -> list[int]:
    control = BudgetController(CACHE, **options)
    found = []
    for overlap in overlaps:
        control.update(overlap)
        found.append(control.cache.budget)
    return found


def test_the_budget_follows_the_overlap_by_tenths():
    # Below 0.86 it rises, between 0.86 and 0.93 it stays, above it falls.
    assert budgets([0.5, 0.85, 0.86, 0.92, 0.94], target=0.86) == [110, 121, 121, 121, 109]


def test_the_budget_stays_within_its_bounds():
    assert budgets([0.1] * 20, target=0.86)[-1] == 200
    assert budgets([1.0] * 20, target=0.86)[-1] == 50
    assert budgets([1.0] * 3, target=0.86, bounds=[90, 110]) == [90, 90, 90]
    small = BudgetController(replace(CACHE, budget=6), target=0.86)
    small.update(1.0)
    assert small.cache.budget == 5  # sink + window + 1


def test_without_a_target_nothing_changes():
    assert budgets([0.1, 1.0]) == [100, 100]
    assert BudgetController(CACHE).controlled is None


def test_a_resumed_controller_goes_on_from_the_same_budget():
    control, resumed = (BudgetController(CACHE, target=0.86) for _ in range(2))
    control.update(0.1)
    resumed.load_state_dict(control.state_dict())
    assert resumed.cache == control.cache != CACHE
    fixed = BudgetController(CACHE)
    fixed.load_state_dict(control.state_dict())
    assert fixed.cache == CACHE
