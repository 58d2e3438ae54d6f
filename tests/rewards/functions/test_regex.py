import pytest

from lit_rlkv.rewards import Regex
from lit_rlkv.types import Problem
from tests.rewards.asking import opened


def test_a_pattern_is_searched_for():
    with opened(Regex(pattern=r"(?s)\A<think>.*</think>\s*\S")) as ask:
        assert ask("<think>a\nb</think> 4") == 1.0
        assert ask("so <think>a</think> 4") == 0.0
        assert ask("<think>a</think>") == 0.0


def test_the_last_match_of_a_group_must_be_the_answer():
    with opened(Regex(pattern=r"answer: (?P<it>\w+ ?)", group="it")) as ask:
        assert ask("answer: 3, no, answer: 4 ", "4") == 1.0
        assert ask("answer: 4, no, answer: 3", "4") == 0.0
        assert ask("4", "4") == 0.0


def test_a_group_that_takes_no_part_in_the_match_is_no_answer():
    with opened(Regex(pattern=r"a|(b)", group=1)) as ask:
        assert ask("a", "b") == 0.0


def test_neither_blanks_around_the_answer_nor_columns_called_as_an_option_are_in_the_way():
    with opened(Regex(pattern=r"(\w+)", group=1)) as ask:
        assert ask("b", " b\n", pattern="x", group=7) == 1.0
        assert ask("b", "a", pattern="x", group=7) == 0.0


def test_an_empty_answer_is_refused_where_a_group_is_compared_with_it():
    with pytest.raises(ValueError, match="the answer is empty, so group=1 cannot be compared with it"):
        Regex(pattern="(a*)", group=1).check(Problem("?", "", " "))
    Regex(pattern="(a*)").check(Problem("?", "", ""))


def test_a_pattern_that_takes_for_ever_is_stopped_and_the_next_answer_is_right():
    with opened(Regex(pattern=r"^(a+)+$", timeout_s=0.3)) as ask:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.3 seconds"):
            ask("a" * 40 + "b")
        assert ask("aaa") == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pattern": "("}, r"pattern='\(' is no regular expression: .*; write one of Python's re"),
        ({"pattern": "(a)", "group": 2}, r"pattern='\(a\)' has no group=2; give one of \[0, 1\], or null"),
        ({"pattern": "a", "timeout_s": 0}, "timeout_s=0 gives no time to answer"),
        ({"pattern": "a", "n_workers": 0}, "n_workers=0 is no such count"),
        ({"pattern": "a", "retries": -1}, "retries=-1 is no such count"),
    ],
)
def test_options_that_cannot_work_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Regex(**options)
