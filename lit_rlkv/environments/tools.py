"""Tools: an environment that runs the functions that a response calls."""

import asyncio
import inspect
import json
import operator
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from threading import Lock, Thread
from typing import Any

import regex
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from lit_rlkv.data.chat import Observation, last_end
from lit_rlkv.environments.base import Environment
from lit_rlkv.interrupts import INTERRUPTS
from lit_rlkv.rewards.graders import error_text
from lit_rlkv.trust import load_trusted
from lit_rlkv.types import Message

CALL_TAGS = ("<tool_call>", "</tool_call>")
"""Around the calls of Qwen, SmolLM and Hermes: JSON objects of a name and arguments."""
PATTERN_LIMIT_S = 1.0
"""Longest search of a pattern in one response, in seconds of processor time."""
_LITERAL_BRACE = re.compile(r"(\\N\{[^}]*\}|\\.)|\{(?!\d*,?\d*\})", re.DOTALL)
"""An escape, or a brace of its own, which for `regex` may begin approximate matching."""
MAX_CALLS = 64
"""Most calls in a turn."""
_LOOP_LOCK = Lock()
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Tools(Environment):
    """Runs the tool calls of each turn; a turn without any ends the response.

    The observation is a message of the role `role` for each call: what the tool returned, or its error. The
    reward is 0, so that it comes from the task's verifier or from reward functions.

    Args:
        tools: functions with docstrings and type hints, sync or async, as in TRL, or their dotted names in a
            trusted module.
        pattern: regular expression of a call, with the group `call` for JSON like
            `{"name": "add", "arguments": {"a": 1}}`, or the groups `name` and `arguments`; the arguments are
            JSON or the text of a single one. Without `name` the call is of the only tool. None: the response
            template of the tokenizer, or without one what stands between `CALL_TAGS`.
        role: role of the messages; None: the results are plain text, a line each.

    Raises:
        ValueError: a tool is no function with a docstring and type hints, is not trusted, or has the name of
            another, or the pattern does not name what is called.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | str],
        pattern: str | None = None,
        role: str | None = "tool",
    ) -> None:
        if isinstance(tools, str) or not tools:
            raise ValueError(f"tools must be a list of functions, got {tools!r}; give at least one")
        self.tools = [_function(tool) if isinstance(tool, str) else tool for tool in tools]
        names = [_checked_name(tool) for tool in self.tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"tools must have names of their own, got {', '.join(twice)} twice; rename one")
        self._by_name = dict(zip(names, self.tools, strict=True))
        self._pattern = None if pattern is None else _compiled(pattern, self._by_name)
        self._role = role
        self._parse: Callable[..., Any] | None = None

    def bind(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if self._pattern is None and getattr(tokenizer, "response_template", None):
            schemas: list[Any] = [get_json_schema(tool) for tool in self.tools]
            end = tokenizer.decode([*last_end(tokenizer)])

            def parse(text: str) -> Any:
                try:
                    return tokenizer.parse_response(text, prefix=self.prefix, tools=schemas)
                except Exception:  # as of Llama's template, which reads a call up to the end of the turn
                    return tokenizer.parse_response(f"{text}{end}", prefix=self.prefix, tools=schemas)

            self._parse = parse
            try:
                parse("")
            except Exception as error:
                raise ValueError(
                    f"the tokenizer's response_template cannot be read ({error_text(error)}); correct it, or "
                    "give environment.pattern"
                ) from error

    def worked_observation(self, response: str, text: str) -> Observation:
        calls: list[tuple[str, Any]] = []
        with suppress(Exception):  # of the tokenizer's parser; then the tool has no name
            calls = [*self._calls(response)]
        results = text.removesuffix("\n").split("\n") if len(calls) > 1 else [text]
        if len(results) != max(len(calls), 1):
            raise ValueError(
                f"the observation after a worked turn of {len(calls)} calls must have a line for each, got "
                f"{len(results)}: {text!r:.80}"
            )
        return self._observation(calls or [("", None)], results)

    def _observation(self, calls: Sequence[tuple[str, Any]], results: Sequence[str]) -> Observation:
        if self._role is None:
            return "".join(result if result.endswith("\n") else f"{result}\n" for result in results)
        known = [name if name in self._by_name else None for name, _ in calls]  # the model may make one up
        return [Message(self._role, text, name) for name, text in zip(known, results, strict=True)]

    def step(self, response: str) -> tuple[Observation | None, float, bool]:
        calls: list[tuple[str, Any]] = [("", None)]
        try:
            found = [*self._calls(response)]
            if len(found) > MAX_CALLS:
                raise ValueError(f"a turn must have at most {MAX_CALLS} calls, got {len(found)}")
            calls, results = found, [self._run(*call) for call in found]
        except TimeoutError:  # of the pattern, which is no fault of the response
            raise
        except Exception as error:  # of the tokenizer's parser; a tool's own is its result
            results = [f"error: {error_text(error)}"]
        if not results:
            return None, 0.0, True
        return self._observation(calls, results), 0.0, False

    def _calls(self, response: str) -> Iterator[tuple[str, Any]]:
        """Yield name and arguments of each call; arguments that cannot be read are text, or an error."""
        if self._parse is not None:
            # What was given may have calls too, as in a tool's result.
            given, calls = (self._parse(text).get("tool_calls") or [] for text in ("", response))
            yield from (_name_and_arguments(call.get("function", call)) for call in calls[len(given) :])
            return
        if self._pattern is None:  # not by a pattern, which would search from each open tag to the end
            is_open = "<think>" in response or self.prefix.rstrip().endswith("<think>")
            _, is_closed, said = response.rpartition("</think>")  # a call in a thought is a draft
            said = "" if is_open and not is_closed else said
            found = (part.partition(CALL_TAGS[0]) for part in said.split(CALL_TAGS[1])[:-1])
            yield from (_name_and_arguments(call) for _, tag, call in found if tag)
            return
        only = next(iter(self._by_name)) if len(self._by_name) == 1 else ""
        try:
            matches = [
                match.groupdict("") for match in self._pattern.finditer(response, timeout=PATTERN_LIMIT_S)
            ]
        except TimeoutError:
            raise TimeoutError(
                f"environment.pattern={self._pattern.pattern!r:.200} takes over {PATTERN_LIMIT_S:g} s for "
                f"{len(response)} characters; write it without repeats inside of repeats"
            ) from None
        for groups in matches:
            if "call" in groups:
                yield _name_and_arguments(groups["call"])
            else:
                yield groups.get("name") or only, _from_json(groups["arguments"] or "{}")

    def _run(self, name: str, arguments: Any) -> str:
        """Return the text of what a tool returned, as in TRL, or of its error."""
        try:
            if isinstance(arguments, Exception):
                raise arguments
            if name not in self._by_name:
                raise ValueError(f"there is no tool {name!r}; the tools are {', '.join(self._by_name)}")
            tool = self._by_name[name]
            result = tool(**arguments) if isinstance(arguments, Mapping) else tool(arguments)
            if inspect.isawaitable(result):
                with _LOOP_LOCK:  # else several threads may make one each
                    loop = _event_loop(os.getpid())
                result = asyncio.run_coroutine_threadsafe(_awaited(result), loop).result()
            text = str(result)
            if not isinstance(result, str) and _ADDRESS.search(text):  # which differs from run to run
                raise TypeError(f"the result has no text of its own: {_ADDRESS.sub('', text):.80}")
            return text
        except INTERRUPTS:
            raise
        except BaseException as error:  # sys.exit() included
            return _ADDRESS.sub("", f"error: {error_text(error)}")


def calculator(expression: str) -> str:
    """Calculate one sum, difference or product of whole numbers.

    Args:
        expression: two numbers with +, - or * between them, such as 12*7.

    Returns:
        The result.
    """
    match = re.fullmatch(r"\s*(-?\d{1,18})\s*([-+*])\s*(-?\d{1,18})\s*", expression)
    if match is None:
        raise ValueError("give two whole numbers with +, - or * between them")
    left, sign, right = match.groups()
    return str(_OPERATIONS[sign](int(left), int(right)))


def _function(name: str) -> Callable[..., Any]:
    """Return a tool by its dotted name: one of ours, or of a trusted module."""
    if name == f"{__name__}.{calculator.__name__}":
        return calculator
    found: Callable[..., Any] = load_trusted(name)
    return found


def _checked_name(tool: Any) -> str:
    name = getattr(tool, "__qualname__", repr(tool))
    is_generator = inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool)
    if is_generator or not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise ValueError(
            f"the tool {name} must be a function or method that returns a value; write one with def"
        )
    try:
        return str(get_json_schema(tool)["function"]["name"])
    except Exception as error:
        raise ValueError(
            f"the tool {name} must be a function with a docstring that describes its arguments, and type "
            f"hints: {error}"
        ) from error


def _compiled(pattern: str, tools: Mapping[str, Any]) -> Any:
    """Return a pattern of `re` as one of `regex`."""
    try:
        groups = set(re.compile(pattern, re.DOTALL).groupindex)
        literal = _LITERAL_BRACE.sub(lambda part: part[1] or r"\{", pattern)
        found = regex.compile(literal, regex.DOTALL)  # unlike `re`, it has a time limit and lets signals in
    except Exception as error:  # `re` raises OverflowError and RecursionError, too
        raise ValueError(f"pattern={pattern!r:.200} is not a regular expression: {error}") from error
    is_complete = groups == {"call"} or groups == {"name", "arguments"}
    if not is_complete and (groups != {"arguments"} or len(tools) > 1):
        raise ValueError(
            f"pattern={pattern!r} must have the group call, or name and arguments, or with a single tool "
            f"arguments alone, got {', '.join(sorted(groups)) or 'none'}; write (?P<call>...), for example"
        )
    return found


def _from_json(text: str) -> Any:
    """Return a JSON object, or anything else as the text that it is."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _name_and_arguments(call: Any) -> tuple[str, Any]:
    """Return name and arguments of a call or its JSON; an error stands in place of the arguments."""
    try:
        call = json.loads(call) if isinstance(call, str) else call
        name, arguments = str(call["name"]), {} if call.get("arguments") is None else call["arguments"]
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
            arguments = json.loads(arguments)
        return name, arguments
    except (ValueError, RecursionError) as error:
        return "", ValueError(f"the call is broken JSON: {error}")
    except (KeyError, TypeError, AttributeError):
        return "", ValueError('a call must be an object like {"name": ..., "arguments": {...}}')


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except BaseException as error:  # sys.exit() included, which would end the event loop
        raise RuntimeError(error_text(error)) from error


@cache
def _event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of all tools of this process, as in TRL; a fork has no thread of it."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True, name="async tools").start()
    return loop
