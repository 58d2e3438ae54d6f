"""Chain sums and countdown by hand."""

import random

import pytest

from lit_rlkv.tasks import ChainSum, Countdown
from lit_rlkv.types import Problem

# 7, 7+3=10, 10+5=15, 15+2=17, 17+9=26
CHAIN = Problem("7+3+5+2+9=", "7,10,15,17,26", "26")


@pytest.mark.parametrize("completion", ["7,10,15,17,26", "26", "1,2,26"])
def test_only_the_last_total_counts(completion):
    assert ChainSum().score(CHAIN, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    ["", "26,", ",26", "26,27", "126", "2 6", "026", "+26", "26.0", "26\n", "x26", "٢٦", "7,10,15,17,27"],
)
def test_anything_but_a_list_that_ends_in_the_sum_scores_zero(completion):
    assert ChainSum().score(CHAIN, completion) == 0.0


def test_listing_every_candidate_earns_nothing():
    assert ChainSum().score(CHAIN, ",".join(map(str, range(46)))) == 0.0


def test_a_sampled_chain_adds_up():
    problem = ChainSum(n_terms=4, max_operand=20).sample(random.Random(0))
    operands = [int(operand) for operand in problem.prompt.removesuffix("=").split("+")]
    assert len(operands) == 4
    assert all(1 <= operand <= 20 for operand in operands)
    assert [int(total) for total in problem.solution.split(",")] == [sum(operands[:n]) for n in range(1, 5)]
    assert int(problem.answer) == sum(operands)


def corrupted(solution, seed):
    """The totals of a corrupted solution."""
    wrong = ChainSum().corrupt(Problem("?", solution, "?"), random.Random(seed))
    return [int(total) for total in wrong.split(",")]


def test_a_slip_is_carried_to_the_end():
    for seed in range(50):
        totals = corrupted("7,10,15", seed)
        errors = [wrong - right for wrong, right in zip(totals, [7, 10, 15], strict=True)]
        start = errors.index(errors[-1])
        assert errors == [0] * start + [errors[-1]] * (3 - start)
        assert abs(errors[-1]) in (1, 2, 10)


def test_a_slip_never_makes_a_total_negative():
    assert all(min(corrupted("0,1,1", seed)) >= 0 for seed in range(100))


def test_corrupted_solutions_are_off_by_the_slips_given():
    task = ChainSum(n_terms=3, slips=[4, 7])
    problem = Problem("7+3+5=", "7,10,15", "15")
    totals = {task.corrupt(problem, random.Random(seed)).rpartition(",")[2] for seed in range(50)}
    assert totals == {"19", "22"}


TARGET_63 = Problem("25,4,3>63:", "25-4=21,21*3=63", "63")


@pytest.mark.parametrize("completion", ["25-4=21,21*3=63", "25-4=21,3*21=63", "25*3=75,75-4=71"])
def test_any_valid_way_to_the_target_counts(completion):
    target = completion.rpartition("=")[2]
    assert Countdown().score(Problem(f"25,4,3>{target}:", "", target), completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "63",
        "63=63",
        "60+3=63",  # 60 is not on the table
        "21*3=63",  # nor is 21 before it is made
        "25-4=21,21*3=63,",
        "25-4=21,21*4=84",  # true, but 4 is gone
        "25-4=21,21+21=42,42+21=63",  # one 21 used three times
        "25-4=21,21*3=63,63-3=60",  # 3 is gone, and 60 is no target
        "25*3=63",  # false arithmetic
        "25-4=21,21*3=063",
        "025-4=21,21*3=63",
        "25-4=21;21*3=63",
        "(25-4)*3=63",
        "25-4=21,21*3=63\n",
        "25-4=21,3-21=-18",
    ],
)
def test_a_false_or_forbidden_step_scores_zero(completion):
    assert Countdown().score(TARGET_63, completion) == 0.0


def test_a_number_given_twice_may_be_used_twice():
    assert Countdown().score(Problem("4,4,3>16:", "", "16"), "4*4=16") == 1.0
    assert Countdown().score(Problem("4,3,3>16:", "", "16"), "4*4=16") == 0.0


def test_an_enormous_number_is_wrong_rather_than_an_error():
    assert Countdown().score(TARGET_63, f"{'9' * 5000}+4={'9' * 5000}") == 0.0
    assert Countdown().score(TARGET_63, f"25+4={'9' * 5000}") == 0.0


def test_sampled_solutions_stay_in_range_and_use_every_number():
    task = Countdown(n_numbers=4, max_number=12, max_target=60)
    for seed in range(100):
        problem = task.sample(random.Random(seed))
        given = [int(number) for number in problem.prompt.partition(">")[0].split(",")]
        results = [int(step.partition("=")[2]) for step in problem.solution.split(",")]
        assert len(given) == 4
        assert all(1 <= number <= 12 for number in given)
        assert len(results) == 3
        assert all(1 <= result <= 60 for result in results)


def test_a_corruption_misses_the_target_or_claims_it_falsely():
    # Last step 21*3=63: by + it is 24, by - it is 18.
    rejected = {Countdown().corrupt(TARGET_63, random.Random(seed)) for seed in range(100)}
    assert rejected == {f"25-4=21,{last}" for last in ("21+3=24", "21-3=18", "21+3=63", "21-3=63")}
