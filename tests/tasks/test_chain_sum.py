"""Chain sums by hand."""

import random

import pytest

from lit_rlkv.tasks import ChainSum
from lit_rlkv.tasks.base import slip
from lit_rlkv.types import Problem

# 7, 7+3=10, 10+5=15, 15+2=17, 17+9=26
PROBLEM = Problem("7+3+5+2+9=", "7,10,15,17,26", "26")


@pytest.mark.parametrize("completion", ["7,10,15,17,26", "26", "1,2,26"])
def test_only_the_last_total_counts(completion):
    assert ChainSum().score(PROBLEM, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    ["", "26,", ",26", "26,27", "126", "2 6", "026", "+26", "26.0", "26\n", "x26", "٢٦", "7,10,15,17,27"],
)
def test_anything_but_a_list_that_ends_in_the_sum_scores_zero(completion):
    assert ChainSum().score(PROBLEM, completion) == 0.0


def test_listing_every_candidate_earns_nothing():
    assert ChainSum().score(PROBLEM, ",".join(map(str, range(46)))) == 0.0


def test_a_sampled_chain_adds_up():
    problem = ChainSum(n_terms=4, max_operand=20).sample(random.Random(0))
    operands = [int(operand) for operand in problem.prompt.removesuffix("=").split("+")]
    assert len(operands) == 4
    assert all(1 <= operand <= 20 for operand in operands)
    assert [int(total) for total in problem.solution.split(",")] == [sum(operands[:n]) for n in range(1, 5)]
    assert int(problem.answer) == sum(operands)


def test_a_slip_is_carried_to_the_end():
    for seed in range(50):
        errors = [
            wrong - right
            for wrong, right in zip(slip([7, 10, 15], random.Random(seed)), [7, 10, 15], strict=True)
        ]
        start = errors.index(errors[-1])
        assert errors == [0] * start + [errors[-1]] * (3 - start)
        assert abs(errors[-1]) in (1, 2, 10)


def test_a_slip_never_makes_a_total_negative():
    assert all(min(slip([0, 1, 1], random.Random(seed))) >= 0 for seed in range(100))


def test_corrupted_solutions_are_off_by_the_slips_given():
    task = ChainSum(n_terms=3, slips=[4, 7])
    problem = Problem("7+3+5=", "7,10,15", "15")
    totals = {task.corrupt(problem, random.Random(seed)).rpartition(",")[2] for seed in range(50)}
    assert totals == {"19", "22"}


@pytest.mark.parametrize("slips", [[0, 1], [-1, -2], []])
def test_slips_that_leave_a_solution_right_are_refused(slips):
    with pytest.raises(ValueError, match="make no wrong solution of every right one"):
        ChainSum(slips=slips)
