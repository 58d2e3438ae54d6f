"""Reward functions."""

from lit_rlkv.rewards.functions.answers import ExactMatch, MathVerify, Numeric, Regex
from lit_rlkv.rewards.functions.base import RewardFunction
from lit_rlkv.rewards.functions.endpoint import Endpoint
from lit_rlkv.rewards.functions.user_code import Command, PythonFunction

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
