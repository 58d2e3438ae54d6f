"""Environments of the responses of a rollout: threads with a time limit, text to tokens and back."""

import logging
import math
import reprlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from threading import Thread, current_thread, main_thread
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlkv.checks import OneLineError
from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.data.chat import Observation, as_messages, encode_observation, format_prompt
from lit_rlkv.data.chat_template import choose_template
from lit_rlkv.data.tokenizers import decode_turn
from lit_rlkv.environments.base import Environment
from lit_rlkv.interrupts import INTERRUPTS
from lit_rlkv.rewards.graders import error_text
from lit_rlkv.rewards.verifier import MAX_SCORE
from lit_rlkv.types import Message, Problem, Prompt, prompt_text

log = logging.getLogger(__name__)
_Step = tuple[Observation | None, float, bool]
MAX_HUNG = 64
"""Calls that may exceed the time limit and still run; more, if as many are made at a time."""


class EnvironmentPool:
    """The environments of a run, and the threads that call them.

    A thread that exceeds the time limit cannot be ended: it goes on in the background, and its result is
    dropped; `MAX_HUNG` of them end the run. Without a limit, environments are called in this thread, and a
    rollout depends on the seed alone.

    Args:
        environment_factory: makes the environment of one response.
        settings: `max_turns`, `max_observation_tokens`, `environment_timeout_s`, `environment_workers`.
    """

    def __init__(
        self,
        environment_factory: Callable[[], Environment],
        settings: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.factory = environment_factory
        self.settings = settings
        self.tokenizer = tokenizer
        self._overdue: set[Thread] = set()
        """Threads that have exceeded the time limit, but for some that have ended since."""
        self._has_warned = False

    @cached_property
    def _workers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.settings.environment_workers, thread_name_prefix="environment")

    @cached_property
    def _example(self) -> Environment:
        """An environment of no response."""
        environment = self.factory()
        choose_template(self.tokenizer, environment.tools)
        environment.bind(self.tokenizer)
        return environment

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """Functions that the chat template is to describe."""
        return self._example.tools

    def worked_observation(self, response: str, text: str) -> Observation:
        """Return the observation after a worked turn, as `Environment.worked_observation`."""
        return self._example.worked_observation(response, text)

    def check(self) -> None:
        """Raise a ValueError if the chat template cannot write observations of the environment's role."""
        encode_observation(self.tokenizer, self.worked_observation("", "1"))

    def begin(self, problems: Sequence[Problem]) -> "TextConversations":
        """Make and reset the environments of these responses."""
        return TextConversations(self, problems)

    def prompts(self, problems: Sequence[Problem]) -> list[Prompt]:
        """Return the prompts with what `reset` appends, from environments that are not used further.

        Raises:
            ValueError: a `reset` failed.
        """
        talk = self.begin(problems)
        if talk.errors:
            place, error = next(iter(talk.errors.items()))
            raise ValueError(
                f"the environment's reset failed for {prompt_text(problems[place].prompt)!r:.200}: {error}"
            )
        return talk.prompts(group_size=1)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Return the future result of a call."""
        if self.settings.environment_timeout_s is not None:
            self._check_hung()
            return self._workers.submit(self._within_limit, function, *arguments)
        future: Future[Any] = Future()
        _settle(future, function, *arguments)
        return future

    def _within_limit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._check_hung()
        future: Future[Any] = Future()
        thread = Thread(target=_settle, args=(future, function, *arguments), daemon=True, name="environment")
        thread.start()
        limit_s = self.settings.environment_timeout_s
        try:
            return future.result(limit_s)
        except TimeoutError:
            self._overdue.add(thread)
            raise TimeoutError(f"no answer within {limit_s:g} seconds") from None

    def _check_hung(self) -> None:
        """End the run if too many threads have exceeded the time limit and still run."""
        self._overdue -= {thread for thread in tuple(self._overdue) if not thread.is_alive()}
        most = max(MAX_HUNG, self.settings.environment_workers)
        if len(self._overdue) >= most:
            raise OneLineError(
                f"{most} calls of the environment still run after rollout.environment_timeout_s="
                f"{self.settings.environment_timeout_s:g} seconds; give what they wait for a time limit of "
                "its own, or raise this one"
            )

    def warn(self, error: str) -> None:
        """Log the first error of the run."""
        if not self._has_warned:
            log.warning(
                "the environment failed: %s; such responses are left out and counted in "
                "reward/failed_fraction; this warning is shown once",
                error,
            )
        self._has_warned = True


def _settle(future: "Future[Any]", function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function, and give its result or error to the future; a signal in the main thread passes."""
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # sys.exit() included: it fails this response, and not the run
        if isinstance(error, INTERRUPTS) and current_thread() is main_thread():
            raise
        future.set_exception(RuntimeError(error_text(error)))


class TextConversations:
    """The environments of the responses of one rollout; the `Conversations` of `generate`.

    What was sampled is never encoded again: the tokens of an observation are those that the chat template
    writes after a turn, or those of its text without a template.
    """

    def __init__(self, pool: EnvironmentPool, problems: Sequence[Problem]) -> None:
        self.errors: dict[int, str] = {}
        """Message of each response whose environment failed."""
        self.cut: set[int] = set()
        """Responses that had no room for their next observation."""
        self._pool = pool
        self._problems = problems
        self._returns = [0.0] * len(problems)
        self._said: list[list[Message]] = [[] for _ in problems]
        self._newest: list[Sequence[int]] = [()] * len(problems)
        """Tokens of the newest turn of each response."""
        opened = [pool.submit(self._open, problem) for problem in problems]
        self._environments: list[Environment | None] = []
        self._prompts: list[Prompt] = []
        for place, future in enumerate(opened):
            environment, prompt = None, problems[place].prompt
            try:
                environment, observation = future.result()
                prompt = extended(prompt, observation)
            except Exception as error:
                self._fail(place, error)
            self._environments.append(environment)
            self._prompts.append(prompt)

    def _open(self, problem: Problem) -> tuple[Environment, Observation | None]:
        environment = self._pool.factory()
        environment.bind(self._pool.tokenizer)
        return environment, environment.reset(problem)

    @property
    def returns(self) -> Float[Tensor, " batch"]:
        """Sum of the rewards of each response's turns; NaN where its environment failed."""
        return torch.tensor([math.nan if n in self.errors else r for n, r in enumerate(self._returns)])

    @property
    def is_cut(self) -> Bool[Tensor, " batch"]:
        """True for responses that had no room for their next observation."""
        return torch.tensor([place in self.cut for place in range(len(self._problems))])

    @property
    def transcripts(self) -> list[str]:
        """Each response with its observations, as readable text."""
        return [said[0].content if len(said) == 1 else prompt_text(tuple(said)) for said in self._said]

    def prompts(self, group_size: int) -> list[Prompt]:
        """Return the prompt of each group, with what its environments have appended.

        A response whose environment appended something else than the first one of its group has failed.
        """
        found = []
        for first in range(0, len(self._prompts), group_size):
            places = range(first, first + group_size)
            begun = [place for place in places if place not in self.errors]
            found.append(self._prompts[begun[0] if begun else first])
            for place in begun:
                if self._prompts[place] != found[-1]:
                    self._fail(
                        place, ValueError("reset must return the same in each response to a problem; seed it")
                    )
            self._show(begun, format_prompt(self._pool.tokenizer, found[-1], self._pool.tools))
        return found

    def ask(self, place: int, token_ids: Sequence[int]) -> "Future[_Step | None]":
        text, environment = decode_turn(self._pool.tokenizer, token_ids), self._environments[place]
        self._said[place].append(Message("assistant", text))
        self._newest[place] = token_ids
        if environment is None or place in self.errors:
            nothing: Future[_Step | None] = Future()
            nothing.set_result(None)
            return nothing
        return self._pool.submit(environment.step, text)

    def answer(self, place: int, answered: "Future[_Step | None]", most_tokens: int) -> list[int]:
        settings = self._pool.settings
        try:
            if (step := answered.result()) is None:
                return []
            observation, reward, done = checked_step(step)
            self._returns[place] += reward
            n_turns = sum(message.role == "assistant" for message in self._said[place])
            if observation is None or done or n_turns == settings.max_turns:
                return []
            observation, token_ids = fitting(
                self._pool.tokenizer, observation, settings.max_observation_tokens, self._newest[place]
            )
        except Exception as error:
            self._fail(place, error)
            return []
        if len(token_ids) > most_tokens:
            self.cut.add(place)
            return []
        self._said[place] += as_messages(observation)
        self._show([place], str(self._pool.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)))
        return token_ids

    def _show(self, places: Sequence[int], text: str) -> None:
        for place in places:
            if (environment := self._environments[place]) is not None:
                environment.prefix = text

    def _fail(self, place: int, error: Exception) -> None:
        if isinstance(error, OneLineError):
            raise error
        self.errors[place] = error_text(error)
        self._pool.warn(self.errors[place])


def checked_step(step: Any) -> _Step:
    """Return what an environment's `step` returned.

    Raises:
        ValueError: it is no observation, reward and done.
    """
    if not isinstance(step, tuple) or len(step) != 3:
        raise ValueError(f"step must return (observation, reward, done), got {reprlib.repr(step)}")
    observation, reward, done = step
    if not isinstance(reward, int | float) or not abs(reward) <= MAX_SCORE:
        raise ValueError(f"the reward of a step must be a number of size at most {MAX_SCORE:g}, got {reward}")
    if not done and not observation:
        raise ValueError(f"step must return an observation unless it is done, got {observation!r}")
    return observation, float(reward), bool(done)


def extended(prompt: Prompt, observation: Observation | None) -> Prompt:
    """Return a prompt with an observation after it; a text is added to the last message."""
    if not observation:
        return prompt
    if isinstance(prompt, str) and isinstance(observation, str):
        return prompt + observation
    chat = as_messages(prompt)
    if isinstance(observation, str):
        return (*chat[:-1], Message(chat[-1].role, chat[-1].content + observation))
    return (*chat, *observation)


def fitting(
    tokenizer: PreTrainedTokenizerBase,
    observation: Observation,
    most_tokens: int,
    turn: Sequence[int] | None = None,
) -> tuple[Observation, list[int]]:
    """Return an observation with texts cut to one length, so that it takes at most so many tokens, and these.

    No text is encoded that has more characters than so many tokens can stand for.

    Args:
        turn: see `encode_observation`.

    Raises:
        ValueError: it cannot be encoded, or takes more tokens almost without text.
    """
    messages, room = as_messages(observation), most_tokens * _longest_token(tokenizer)
    lengths = [len(message.content) for message in messages]

    def fitted(length: int) -> tuple[Observation, list[int]] | None:
        if sum(min(each, length) for each in lengths) > room or length == 0 < max(lengths):
            return None
        texts = [replace(message, content=message.content[:length]) for message in messages]
        cut: Observation = texts[0].content if isinstance(observation, str) else texts
        token_ids = encode_observation(tokenizer, cut, turn)
        return (cut, token_ids) if len(token_ids) <= most_tokens else None

    longest = max(lengths)
    found = fitted(longest) or fitted(bisect_left(range(1, longest), True, key=lambda n: fitted(n) is None))
    if found is None:
        raise ValueError(
            f"rollout.max_observation_tokens={most_tokens} is less than the chat template takes; raise it"
        )
    return found


@lru_cache(maxsize=4)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the length of the longest token; cached, as a tokenizer copies its vocabulary for every look."""
    return max(map(len, tokenizer.get_vocab()))
