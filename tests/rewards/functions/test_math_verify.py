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


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("lit_rlkv.rewards.functions.math_verify.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[math\]"'):
        MathVerify()


def test_a_problem_without_an_answer_is_refused():
    if importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs math-verify")
    with pytest.raises(ValueError, match="there is no answer to compare with"):
        MathVerify().check(Problem("?", "", " "))
