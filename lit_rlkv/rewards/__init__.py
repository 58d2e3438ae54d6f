"""From completions to rewards."""

from lit_rlkv.rewards.functions import (
    Command,
    Endpoint,
    ExactMatch,
    MathVerify,
    Numeric,
    PythonFunction,
    Regex,
    RewardFunction,
)
from lit_rlkv.rewards.manager import Answers, RewardManager
from lit_rlkv.rewards.verifier import score

__all__ = [
    "Answers",
    "Command",
    "Endpoint",
    "ExactMatch",
    "MathVerify",
    "Numeric",
    "PythonFunction",
    "Regex",
    "RewardFunction",
    "RewardManager",
    "score",
]
