"""Environments: what a response talks with, turn by turn."""

from lit_rlkv.data.chat import Observation
from lit_rlkv.environments.base import Environment
from lit_rlkv.environments.tools import Tools, calculator

__all__ = ["Environment", "Observation", "Tools", "calculator"]
