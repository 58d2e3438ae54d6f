"""Chat templates: rendering that fails in one line, and what they write after a turn."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from lit_rlkv.rewards.isolated import TEMPLATE
from lit_rlkv.types import Message

Tool = Callable[..., Any]
Chat = list[dict[str, Any]]
"""Messages, as `apply_chat_template` takes them."""
TURN, RESULT = "turn0f3a9c", "result5e2b71"
"""Texts in place of a turn and of a message, to find them in what a chat template writes."""
LIMITS = {"limit_s": 4, "limit_bytes": 1 << 29, "limit_characters": 1_000_000}
"""Most processor time, memory and text of a template for a short chat."""
_QUESTION = {"role": "user", "content": "what is 2 * 3? " * 9}  # in characters of every tokenizer


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that are more than pieces of text."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def shared_start(first: Sequence[int], second: Sequence[int]) -> Sequence[int]:
    """Return the tokens with which both begin."""
    return first[: len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])]


def as_chat(prompt: str | Sequence[Message]) -> Chat:
    """Return messages as dicts; a text is one of the user."""
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return [message.as_dict() for message in chat]


def render(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, tools: Sequence[Tool] = (), opens: bool = True
) -> str:
    """Return a chat in the tokenizer's chat template; `opens` adds the generation prompt.

    Raises:
        ValueError: there is no template, or it refuses the chat.
    """
    shown = repr("\n".join(f"{message['role']}: {message['content']}" for message in chat))
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer has no chat template to write the chat {shown:.200} with; use a model that has "
            "one, or prompts and observations of text"
        )
    schemas: list[Any] = [get_json_schema(tool) for tool in tools]
    try:
        return cast(
            str,
            tokenizer.apply_chat_template(
                chat, tools=schemas or None, tokenize=False, add_generation_prompt=opens
            ),
        )
    except Exception as error:  # a stranger's template may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"the tokenizer's chat template refuses {shown}: {reason:.300}; change the messages, or use "
            "another model"
        ) from error


def choose_template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> None:
    """Keep the one of several chat templates that transformers takes, so that all texts are of the same."""
    if isinstance(tokenizer.chat_template, dict):
        schemas: list[Any] = [get_json_schema(tool) for tool in tools]
        tokenizer.chat_template = tokenizer.get_chat_template(tools=schemas or None)


def after_turn(
    tokenizer: PreTrainedTokenizerBase, following: Chat, tool: str = "", opens: bool = True
) -> str:
    """Return what the chat template writes after a turn: its end, what follows, and what opens the next turn.

    Args:
        tool: the turn calls this one, as `tool_calls`; empty: it is a text.
    """
    call = {"type": "function", "function": {"name": tool, "arguments": {"text": TURN}}}
    turn = {"content": "", "tool_calls": [call]} if tool else {"content": TURN}
    chat: Chat = [_QUESTION, {"role": "assistant", **turn}, *following]
    return render(tokenizer, chat, opens=opens).partition(TURN)[2]


def follows_calls(tokenizer: PreTrainedTokenizerBase, role: str) -> bool:
    """Return True if what stands before a message of a role depends on `tool_calls` of the turn before.

    Raises:
        ValueError: there is no template, or it does not show messages of this role.
    """
    return _follows_calls(tokenizer, str(tokenizer.chat_template), role)


@lru_cache(maxsize=64)
def _follows_calls(tokenizer: PreTrainedTokenizerBase, template: str, role: str) -> bool:
    reason, written = "they are left out", {"": "", "tool": ""}
    for tool in ("",) if role == "user" else ("", "tool"):
        try:
            written[tool] = after_turn(tokenizer, [Message(role, RESULT, tool or None).as_dict()], tool)
        except ValueError as error:
            if tokenizer.chat_template is None:
                raise
            reason = " ".join(str(error.__cause__).split())
    if RESULT not in written[""] + written["tool"]:
        raise ValueError(
            f"the tokenizer's chat template shows no messages of the role {role!r} after a turn ({reason}); "
            "use another role, such as user, or another model"
        )
    return RESULT in written["tool"] and not (RESULT in written[""] and written["tool"].endswith(written[""]))


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens with which the chat template closes the last turn, and one that the user answers.

    They differ in few templates: gpt-oss has `<|return|>` and `<|end|>`. They are empty without a template,
    and where it writes no special token there, as GLM.
    """
    return _turn_ends(tokenizer, str(tokenizer.chat_template), len(tokenizer))


@lru_cache(maxsize=16)
def _turn_ends(
    tokenizer: PreTrainedTokenizerBase, template: str, n_tokens: int
) -> tuple[Sequence[int], Sequence[int]]:
    def written(*following: dict[str, str], opens: bool) -> Sequence[int]:
        try:
            return tokenizer.encode(
                after_turn(tokenizer, [*following], opens=opens), add_special_tokens=False
            )
        except Exception:  # tokenizers raises Exception itself for characters without a token
            return []

    special, last, answered = special_ids(tokenizer), written(opens=False), written(_QUESTION, opens=True)
    # A template that always opens a next turn may open it as that of the user.
    opens_always = last == written(opens=True)
    shared = shared_start(last, answered) or ([] if opens_always else last)
    first = next((n for n, id_ in enumerate(shared) if id_ in special), len(shared))
    n_ends = len([*takewhile(special.__contains__, shared[first:])])
    n_ends = min(n_ends, 1) if opens_always and len(shared) < len(last) else n_ends
    end = shared[: first + n_ends] if n_ends else []
    between = answered[: len(end)]
    return end, between if special.issuperset({*between} - {*end}) else []


@lru_cache(maxsize=64)
def check_rendering(template: str, variables: str) -> None:
    """Raise a ValueError if a stranger's template takes too much time, memory or text, in its own process.

    Args:
        variables: of the template, as JSON.
    """
    turn, long = {"role": "assistant", "content": "6"}, {**_QUESTION, "content": "what is 2 * 3? " * 300}
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": "2"}}}
    used: Chat = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "6"},
    ]
    system, takes = {"role": "system", "content": "calculate"}, {"type": "object", "properties": {}}
    tool = {"name": "multiply", "description": "a product", "parameters": takes}
    schema = {"type": "function", "function": tool}
    chats: list[tuple[Chat, bool, Any]] = [
        ([_QUESTION], True, None),
        ([_QUESTION, turn], False, None),
        ([system, long, *[turn, long] * 3], True, None),
        ([_QUESTION, turn, used[1]], True, None),
        ([system, _QUESTION, *used, turn, _QUESTION], True, [schema]),
    ]
    given = [
        {"messages": chat, "add_generation_prompt": opens, "tools": tools} for chat, opens, tools in chats
    ]
    job = {"template": template, "variables": json.loads(variables), "chats": given, **LIMITS}
    # Without a limit of time here: others may keep the processor busy.
    done = subprocess.run(
        [sys.executable, "-P", str(TEMPLATE)], input=json.dumps(job), capture_output=True, text=True
    )
    if done.returncode != 0:
        took = f"it takes more than {LIMITS['limit_s']} s" if done.returncode < 0 else done.stderr.strip()
        raise ValueError(f"the tokenizer's chat template refuses a short chat: {took}; use another model")
