"""From completions to rewards."""

from lit_rlkv.rewards.functions.answers import ExactMatch, MathVerify, Numeric, Regex
from lit_rlkv.rewards.functions.base import RewardFunction
from lit_rlkv.rewards.functions.endpoint import Endpoint
from lit_rlkv.rewards.functions.user_code import PythonFunction
from lit_rlkv.rewards.manager import Answers, RewardManager
from lit_rlkv.rewards.verifier import score

__all__ = [
    "Answers",
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
