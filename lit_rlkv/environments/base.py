"""Environment: the interface of what answers the turns of a response."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_rlkv.data.chat import Observation
from lit_rlkv.types import Problem


class Environment(ABC):
    """Answers the turns of one response; subclass it for your own, as in Gymnasium.

    Each response has an instance of its own, which one thread at a time calls. An exception or a timeout
    fails this response alone.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Functions that the chat template is to describe to the model."""
    prefix: str = ""
    """Text that the model saw before this turn: the prompt, or what was given since the turn before."""

    def bind(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer of the run, before `reset`."""
        return None

    def reset(self, problem: Problem) -> Observation | None:
        """Begin a response; return what to append to the prompt, the same in each response to a problem."""
        return None

    def worked_observation(self, response: str, text: str) -> Observation:
        """Return the observation after a worked turn, for SFT, from the text that the task has for it."""
        return text

    @abstractmethod
    def step(self, response: str) -> tuple[Observation | None, float, bool]:
        """Answer a turn, without its end token.

        Returns:
            The observation, the reward of the turn, and True if the response is done; the observation is
            then left out. The rewards of all turns are added up.
        """
