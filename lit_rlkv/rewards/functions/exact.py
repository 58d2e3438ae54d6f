"""The final answer as a text."""

from dataclasses import dataclass

from lit_rlkv.rewards.answers import final_answer
from lit_rlkv.rewards.functions.base import RewardFunction
from lit_rlkv.rewards.graders import Grader, Immediate, Question
from lit_rlkv.types import Problem


@dataclass(frozen=True, kw_only=True)
class ExactMatch(RewardFunction):
    """1.0 if the final answer is the reference, both stripped of surrounding whitespace; else 0.0."""

    answer_after: str | None = None
    """The answer follows the last of these; None compares the whole completion."""
    ignore_case: bool = False

    def open(self) -> Grader:
        return Immediate(self._score)

    def check(self, problem: Problem) -> None:
        if not problem.answer.strip():
            raise ValueError("there is no answer to compare with; set task.answer_column")

    def _score(self, question: Question) -> float:
        stated, answer = final_answer(question["completion"], self.answer_after), question["answer"].strip()
        if stated is None:
            return 0.0
        if self.ignore_case:
            stated, answer = stated.casefold(), answer.casefold()
        return float(stated == answer)
