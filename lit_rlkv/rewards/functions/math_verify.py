"""Mathematical equality, by the optional package math-verify."""

from dataclasses import dataclass
from importlib.util import find_spec

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import Grader
from lit_rlkv.rewards.isolated import FOLDER
from lit_rlkv.types import Problem


@dataclass(frozen=True, kw_only=True)
class MathVerify(SlowFunction):
    """1.0 if the last expression of the completion, LaTeX or plain, equals the answer; else 0.0.

    Raises:
        ImportError: the package math-verify is missing.
    """

    float_rounding: int = 6
    """Decimals by which floats are compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("math_verify") is None:
            raise ImportError('MathVerify needs the package math-verify; pip install -e ".[math]"')

    def open(self) -> Grader:
        # By its path: importing it takes the package, and sympy, which this process does without.
        return self.in_processes(FOLDER / "mathematics.py", "equals", {"float_rounding": self.float_rounding})

    def check(self, problem: Problem) -> None:
        if not problem.answer.strip():
            raise ValueError("there is no answer to compare with; set task.answer_column")
