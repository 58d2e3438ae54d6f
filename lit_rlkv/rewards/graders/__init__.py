"""How a question reaches a reward function: at once, in threads, or in processes that may be killed."""

from lit_rlkv.rewards.graders.base import Grader, Immediate, Question, Refused, question_of
from lit_rlkv.rewards.graders.processes import GraderPool
from lit_rlkv.rewards.graders.threads import Threads

__all__ = ["Grader", "GraderPool", "Immediate", "Question", "Refused", "Threads", "question_of"]
