"""Both orders of asking rewards sample and score the same."""

import argparse

from reward_wait import EARLY, LATE, medians


def test_both_orders_measure_the_same_responses_and_rewards():
    sizes = {"responses": 8, "tokens": 8, "seconds": 0.0, "workers": 1, "rounds": 1}
    found = medians(argparse.Namespace(**sizes))
    assert found.keys() == {LATE, EARLY}
    for name in ("mean_length", "mean_reward"):
        assert found[LATE][name] == found[EARLY][name]
    assert 1 < found[EARLY]["mean_length"] <= 8
    assert found[EARLY]["mean_reward"] > 1
