"""Tools: an environment that runs the functions that a response calls."""

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from lit_rlkv.data.chat import Observation, last_end
from lit_rlkv.environments.base import Environment
from lit_rlkv.trust import load_trusted
from lit_rlkv.types import Message

TOOL_CALL = r"<tool_call>(?P<call>.*?)</tool_call>"
"""Calls of Qwen, SmolLM and Hermes: JSON objects of a name and arguments."""
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Tools(Environment):
    """Runs the tool calls of each turn; a turn without any ends the response.

    The observation is a message of the role `role` for each call: what the tool returned, or its error. The
    reward is 0, so that it comes from the task's verifier or from reward functions.

    Args:
        tools: functions with docstrings and type hints, as in TRL, or their dotted names in a trusted module.
        pattern: regular expression of a call, with the group `call` for JSON like
            `{"name": "add", "arguments": {"a": 1}}`, or the groups `name` and `arguments`; the arguments are
            JSON or the text of a single one. Without `name` the call is of the only tool. None: the response
            template of the tokenizer, or without one `TOOL_CALL`.
        role: role of the messages; None: the results are plain text, a line each.

    Raises:
        ValueError: a tool has no name, docstring or type hints, or is not trusted, or the pattern does not
            name what is called.
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
        self._by_name = {_checked_name(tool): tool for tool in self.tools}
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

    def worked_observation(self, response: str, text: str) -> Observation:
        if self._role is None:
            return text
        names: list[str] = []
        with suppress(Exception):  # of the tokenizer's parser; then the tool has no name
            names = [name for name, _ in self._calls(response)]
        return [Message(self._role, text, names[0] if names else None)]

    def step(self, response: str) -> tuple[Observation | None, float, bool]:
        calls: list[tuple[str, Any]] = [("", None)]
        try:
            calls = [*self._calls(response)]
            results = [self._run(*call) for call in calls]
        except Exception as error:  # of the tokenizer's parser; a tool's own is its result
            results = [f"error: {error}"]
        if not results:
            return None, 0.0, True
        if self._role is None:
            return "".join(f"{result}\n" for result in results), 0.0, False
        named = zip(calls, results, strict=True)
        return [Message(self._role, result, name or None) for (name, _), result in named], 0.0, False

    def _calls(self, response: str) -> Iterator[tuple[str, Any]]:
        """Yield name and arguments of each call; arguments that cannot be read are text."""
        if self._parse is not None:
            # What was given may have calls too, as in a tool's result.
            given, calls = (self._parse(text).get("tool_calls") or [] for text in ("", response))
            yield from (_name_and_arguments(call.get("function", call)) for call in calls[len(given) :])
            return
        only = next(iter(self._by_name)) if len(self._by_name) == 1 else ""
        pattern = self._pattern or re.compile(TOOL_CALL, re.DOTALL)
        for match in pattern.finditer(response):
            groups = match.groupdict()
            if "call" in groups:
                yield _name_and_arguments(_from_json(groups["call"]))
            else:
                yield groups.get("name") or only, _from_json(groups["arguments"])

    def _run(self, name: str, arguments: Any) -> str:
        try:
            if name not in self._by_name:
                raise ValueError(f"there is no tool {name!r}")
            tool = self._by_name[name]
            result = tool(**arguments) if isinstance(arguments, Mapping) else tool(arguments)
        except Exception as error:
            return f"error: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)


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
    try:
        return str(get_json_schema(tool)["function"]["name"])
    except Exception as error:
        raise ValueError(
            f"the tool {tool!r} must be a function with a docstring that describes its arguments, and type "
            f"hints: {error}"
        ) from error


def _compiled(pattern: str, tools: Mapping[str, Any]) -> "re.Pattern[str]":
    try:
        found = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from error
    groups = set(found.groupindex)
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
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def _name_and_arguments(call: Any) -> tuple[str, Any]:
    if not isinstance(call, Mapping):
        return "", call
    arguments = call.get("arguments", {})
    return str(call.get("name", "")), _from_json(arguments) if isinstance(arguments, str) else arguments
