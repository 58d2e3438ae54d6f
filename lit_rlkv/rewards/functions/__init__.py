"""Reward functions, one per file."""

from lit_rlkv.rewards.functions.base import RewardFunction
from lit_rlkv.rewards.functions.command import Command
from lit_rlkv.rewards.functions.endpoint import Endpoint
from lit_rlkv.rewards.functions.exact import ExactMatch
from lit_rlkv.rewards.functions.math_verify import MathVerify
from lit_rlkv.rewards.functions.numeric import Numeric
from lit_rlkv.rewards.functions.python import PythonFunction
from lit_rlkv.rewards.functions.regex import Regex

__all__ = [
    "Command",
    "Endpoint",
    "ExactMatch",
    "MathVerify",
    "Numeric",
    "PythonFunction",
    "Regex",
    "RewardFunction",
]
