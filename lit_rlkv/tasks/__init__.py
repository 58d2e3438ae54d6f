"""Tasks: sources of problems and verifiers of their answers."""

from lit_rlkv.tasks.arithmetic import ChainSum, Countdown, Products
from lit_rlkv.tasks.base import FiniteTask, Task, UserTask
from lit_rlkv.tasks.lists import Recall, Sorting
from lit_rlkv.tasks.preferences import Preferences, load_preferences, read_preferences
from lit_rlkv.tasks.problems import JsonlTask, Problems, load_problems
from lit_rlkv.tasks.reasoning_gym import ReasoningGym

__all__ = [
    "ChainSum",
    "Countdown",
    "FiniteTask",
    "JsonlTask",
    "Preferences",
    "Problems",
    "Products",
    "ReasoningGym",
    "Recall",
    "Sorting",
    "Task",
    "UserTask",
    "load_preferences",
    "load_problems",
    "read_preferences",
]
