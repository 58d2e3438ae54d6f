"""Hyperband: brackets, and the runs that it stops."""

from itertools import islice

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.config.options import convert
from lit_rlkv.sweeping.hyperband import Hyperband


def test_brackets_are_those_of_the_documented_examples():
    assert list(islice(Hyperband(min_iter=3).brackets(), 4)) == [3, 9, 27, 81]
    assert list(Hyperband(max_iter=27, s=2).brackets()) == [3, 9]
    assert list(Hyperband(max_iter=27, s=9).brackets()) == [1, 3, 9]


def test_no_run_is_stopped_before_the_first_bracket():
    assert Hyperband(min_iter=3).stops([9.0, 9.0], [[0.0] * 9] * 5) is None


def test_the_first_to_arrive_goes_on_and_the_worst_of_three_does_not():
    rule = Hyperband(min_iter=2, eta=3)
    assert rule.stops([5.0, 5.0], []) is None
    # Sorted at the bracket: 1, 2, 5. Position 3 / 3 = 1 holds 2, so the best two go on.
    assert rule.stops([5.0, 5.0], [[9.0, 1.0], [9.0, 2.0]]) == 2
    assert rule.stops([5.0, 2.0], [[9.0, 1.0], [9.0, 5.0]]) is None


def test_rivals_that_have_not_come_as_far_do_not_count():
    rule = Hyperband(min_iter=2, eta=3)
    assert rule.stops([5.0, 5.0], [[1.0], [2.0]]) is None


def test_unless_it_is_strict_a_run_is_judged_by_its_best_so_far():
    # At the bracket 1, 2, 5 as before; this run had 2 before it.
    rivals = [[9.0, 1.0], [9.0, 2.0]]
    assert Hyperband(min_iter=2, eta=3).stops([2.0, 5.0], rivals) is None
    assert Hyperband(min_iter=2, eta=3, strict=True).stops([2.0, 5.0], rivals) == 2


def test_a_run_past_a_bracket_is_judged_again_as_others_arrive():
    rule = Hyperband(min_iter=2, eta=3)
    late = [5.0, 5.0, 5.0]
    assert rule.stops(late, []) is None
    assert rule.stops(late, [[9.0, 1.0], [9.0, 2.0]]) == 2


def test_not_a_number_is_the_worst_of_all():
    rule = Hyperband(min_iter=1, eta=2)
    assert rule.stops([float("nan")], [[1.0], [2.0]]) == 1
    # Sorted: 3, nan. Position 2 / 2 = 1 is the last.
    assert rule.stops([3.0], [[float("nan")]]) is None


def test_a_file_gives_the_options_by_their_documented_names():
    node = {"type": "hyperband", "max_iter": 27, "s": 2, "eta": 3, "strict": True}
    assert convert(Hyperband, node) == Hyperband(max_iter=27, s=2, eta=3, strict=True)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"type": "median"}, "early_terminate.type must be hyperband, got median"),
        ({"type": "hyperband"}, "brackets are set by min_iter alone, or by max_iter with s"),
        ({"type": "hyperband", "max_iter": 27}, "brackets are set by"),
        ({"type": "hyperband", "min_iter": 2, "max_iter": 27}, "brackets are set by"),
        ({"type": "hyperband", "min_iter": 2, "s": 2}, "brackets are set by"),
        ({"type": "hyperband", "min_iter": 2, "max_iter": 27, "s": 2}, "brackets are set by"),
        (
            {"type": "hyperband", "min_iter": 0},
            "min_iter must be a whole number of at least 1 or null, got 0",
        ),
        ({"type": "hyperband", "min_iter": True}, "min_iter must be .*, got true"),
        ({"type": "hyperband", "min_iter": 2, "strict": 1}, "strict must be true or false, got 1"),
        ({"type": "hyperband", "min_iter": 2, "eta": 1}, "eta must be a number above 1, got 1"),
        ({"type": "hyperband", "max_iter": 2, "s": 1, "eta": 3}, "max_iter must be at least eta=3, got 2"),
        ({"type": "hyperband", "min_iter": 2, "reduction": 3}, "unknown key .*reduction"),
    ],
)
def test_options_without_brackets_are_refused(node, says):
    with pytest.raises(ConfigError, match=says):
        convert(Hyperband, node, "early_terminate")
