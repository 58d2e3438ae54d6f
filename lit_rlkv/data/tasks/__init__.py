"""Tasks: where problems come from and how their answers are verified."""

from lit_rlkv.data.tasks.base import FiniteTask, Task, UserTask
from lit_rlkv.data.tasks.chain_sum import ChainSum
from lit_rlkv.data.tasks.countdown import Countdown
from lit_rlkv.data.tasks.dataset import load_problems
from lit_rlkv.data.tasks.jsonl import JsonlTask
from lit_rlkv.data.tasks.preferences import Preferences, read_preferences
from lit_rlkv.data.tasks.preferences_hf import load_preferences
from lit_rlkv.data.tasks.problems import Problems
from lit_rlkv.data.tasks.reasoning_gym import ReasoningGym
from lit_rlkv.data.tasks.recall import Recall
from lit_rlkv.data.tasks.sorting import Sorting
from lit_rlkv.data.tasks.variables import Variables

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
