import importlib.util

import pytest

from lit_rlkv.rewards import MathVerify
from lit_rlkv.types import Problem
from tests.rewards.asking import opened


def test_expressions_are_equal_by_their_value():
    pytest.importorskip("math_verify")
    with opened(MathVerify()) as ask:
        assert ask(r"so it is $\boxed{\frac{1}{2}}$", "0.5") == 1.0
        assert ask(r"so it is $\boxed{\frac{1}{3}}$", "0.5") == 0.0
        assert ask(r"$2\sqrt{2}$", r"\sqrt{8}") == 1.0
        assert ask("#### 1,000", "1000") == 1.0
        assert ask("nothing", "1000") == 0.0


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"2\sqrt{3}", r"2\sqrt{3}", "2"),
        (r"3\pi", r"3\pi", "3"),
        ("5x^2+1", "1+5x^2", "5"),
        ("(3, 4)", "(3, 4)", "4"),
        ("[0, 5]", "[0,5]", "5"),
        (r"2 + \sqrt{5}", r"\sqrt5+2", "2"),
        ("2^{10}", "1024", "2"),
        ("6 - 5i", "6-5i", "5"),
        (r"1 \pm \sqrt{2}", r"1\pm\sqrt2", "1"),
        (r"10\%", r"10\%", "1"),
        ("1,2", "1,2", "1.2"),
        ("3!", "6", "3"),
        ("12", "12", "1"),
        ("1,000", "1000", "1"),
        ("1 000", "1000", "0"),
        (r"\frac{3}{4}", r"\frac34", "3"),
        (r"\text{Evelyn}", "Evelyn", "Eve"),
        (r"$3\pi$", r"3\pi", "3"),
        (r"so \(3\pi\)", r"3\pi", "3"),
    ],
)
def test_an_answer_without_dollar_signs_is_read_whole(answer, right, wrong):
    pytest.importorskip("math_verify")
    with opened(MathVerify()) as ask:
        assert ask(rf"so it is \boxed{{{right}}}", answer) == 1.0
        assert ask(rf"so it is \boxed{{{wrong}}}", answer) == 0.0


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("lit_rlkv.rewards.functions.math_verify.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[math\]"'):
        MathVerify()


def test_a_problem_without_an_answer_is_refused():
    if importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs math-verify")
    with pytest.raises(ValueError, match="there is no answer to compare with"):
        MathVerify().check(Problem("?", "", " "))
