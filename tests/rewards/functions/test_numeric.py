import time

import pytest

from lit_rlkv.rewards import Numeric
from lit_rlkv.types import Problem
from tests.rewards.asking import score


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("it makes 1000", "1,000", 1.0),
        ("it makes $1,000.00.", "1000", 1.0),
        ("12,345,678", "12345678", 1.0),
        ("1,0000", "10000", 0.0),  # not how thousands are grouped
        ("10-5", "-5", 0.0),  # an operator, no sign
        ("10-5", "5", 0.0),
        ("10 - 3", "3", 0.0),
        ("10 - 3 = 7", "7", 1.0),
        ("it is 2/3*9", "9", 0.0),
        (r"2\times3 is 6", "6", 1.0),
        (r"10 - \frac{1}{2}", "1/2", 0.0),
        ("10\n- 3", "3", 1.0),  # an item of a list
        ("–5", "-5", 1.0),
        ("–5", "5", 0.0),
        ("10–3", "3", 0.0),
        ("the answer – 42", "42", 1.0),
        (r"\frac{–3}{4}", "-3/4", 1.0),
        ("= -5", "-5", 1.0),
        ("−5", "-5", 1.0),
        ("5", "-5", 0.0),
        ("3/4", "0.75", 1.0),
        ("0.75", "3/4", 1.0),
        ("1/3", "0.333", 0.0),
        ("1e3", "1000", 1.0),
        ("50%", "50", 1.0),
        ("50%", "0.5", 1.0),
        ("0.5", "50%", 1.0),
        ("50%", "0.5%", 0.0),
        ("5 or 6", "5", 0.0),  # the last number counts
        ("5 or 6", "6", 1.0),
        ("x2 is 3cm", "3", 1.0),
        ("x2", "2", 0.0),
        ("no number", "2", 0.0),
        ("", "2", 0.0),
        ("1/0", "0", 0.0),
        ("9" * 5000, "9", 0.0),
        (r"\boxed{\frac{3}{4}}", "0.75", 1.0),
        (r"\boxed{\frac{3}{4}}", "4", 0.0),
        (r"-\dfrac{3}{4}", "-3/4", 1.0),
        (r"\tfrac{-3}{4}", "-3/4", 1.0),
        (r"2\frac{1}{2}", "2.5", 1.0),  # not 21/2
        ("3 1/2", "3.5", 1.0),
        ("3 1/2", "0.5", 0.0),
        ("-1 1/2", "-1.5", 1.0),
        ("10^{6}", "6", 0.0),
        ("10^{6}", "10", 0.0),
        ("10^{-6}", "-6", 0.0),
        ("5, so 10^6", "5", 0.0),
        ("1,0000", "0", 0.0),
        ("答案是18。", "18", 1.0),
        ("答案是-18", "-18", 1.0),
        ("_18_", "18", 1.0),
        ("**18**", "18", 1.0),
        ("x_2", "2", 0.0),
        ("it is...18", "18", 1.0),
        ("it is...18", "0.18", 0.0),
    ],
)
def test_numbers_are_equal_however_they_are_written(completion, answer, expected):
    assert score(Numeric(), completion, answer) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("5\n#### 72 apples, 3 each", 1.0),
        ("#### 72\n- 3 each", 1.0),
        ("#### 72\n#### 5", 0.0),
        ("72", 0.0),
        ("#### none", 0.0),
        ("#### 72 -3", 0.0),
        ("#### 72 - 3", 0.0),
        (r"#### 72 \times 3", 0.0),
        ("#### –72", 0.0),
        ("#### 72–3", 0.0),
        ("#### – 72", 1.0),
        ("#### 72^2", 0.0),
        ("#### 72,0000", 0.0),
    ],
)
def test_behind_a_marker_the_first_number_counts(completion, expected):
    assert score(Numeric(answer_after="####"), completion, "72") == expected


def test_an_answer_may_be_off_by_the_tolerance_and_no_more():
    function = Numeric(tolerance=0.25)
    assert [score(function, text, "2") for text in ("2.25", "1.75", "2.26", "1.74")] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("answer", ["", "many", "3 or 4", "1,0000", "10^6"])
def test_an_answer_that_is_not_one_number_is_refused(answer):
    with pytest.raises(ValueError, match="is not one number"):
        Numeric().check(Problem("?", "", answer))
    with pytest.raises(ValueError, match="is not one number"):
        score(Numeric(), "3", answer)


def test_long_texts_of_digits_and_commas_take_no_time():
    started_at = time.perf_counter()
    for text in (
        "1" * 100_000,
        "111," * 25_000 + "1111",
        "1,11" * 25_000,
        "-" * 100_000,
        "1/" * 50_000,
        "1 " * 50_000,
        "1^" * 50_000,
    ):
        score(Numeric(), text, "1")
    assert time.perf_counter() - started_at < 20


def test_a_tolerance_below_zero_is_refused():
    with pytest.raises(ValueError, match="tolerance=-1 is no distance"):
        Numeric(tolerance=-1)
