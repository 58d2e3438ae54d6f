"""Tasks: where problems come from and how their answers are verified."""

from lit_rlkv.tasks.base import FiniteTask, Task, UserTask
from lit_rlkv.tasks.chain_sum import ChainSum
from lit_rlkv.tasks.countdown import Countdown
from lit_rlkv.tasks.dataset import load_problems
from lit_rlkv.tasks.jsonl import JsonlTask
from lit_rlkv.tasks.preferences import Preferences, read_preferences
from lit_rlkv.tasks.preferences_hf import load_preferences
from lit_rlkv.tasks.problems import Problems
from lit_rlkv.tasks.reasoning_gym import ReasoningGym
from lit_rlkv.tasks.recall import Recall
from lit_rlkv.tasks.sorting import Sorting
from lit_rlkv.tasks.variables import Variables

__all__ = [
    "ChainSum",
    "Countdown",
    "FiniteTask",
    "JsonlTask",
    "Preferences",
    "Problems",
    "ReasoningGym",
    "Recall",
    "Sorting",
    "Task",
    "UserTask",
    "Variables",
    "load_preferences",
    "load_problems",
    "read_preferences",
]
