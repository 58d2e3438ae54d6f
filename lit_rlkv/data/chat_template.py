"""Chat templates: rendering that fails in one line, and the tokens that close a turn."""

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
from lit_rlkv.types import Message, prompt_text

Tool = Callable[..., Any]
Chat = list[dict[str, Any]]
"""Messages, as `apply_chat_template` takes them."""
TURN, RESULT = "turn0f3a9c", "result5e2b71"
"""Texts in place of a turn and of a message after it, to find them in what a chat template writes."""
LIMITS = {"limit_s": 3, "limit_bytes": 1 << 29, "limit_characters": 1_000_000}
"""Most processor time, memory and text of a template for a short chat."""
_QUESTION = {"role": "user", "content": "question"}


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that are more than pieces of text."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def shared_start(first: Sequence[int], second: Sequence[int]) -> Sequence[int]:
    """Return the tokens with which both begin."""
    n_shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])
    return first[:n_shared]


def as_chat(prompt: str | Sequence[Message]) -> Chat:
    """Return messages as dicts; a text is one of the user."""
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return [message.as_dict() for message in chat]


def render(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
) -> list[str]:
    """Return chats in the tokenizer's chat template.

    Raises:
        ValueError: there is no template, or it refuses a chat.
    """
    shown = repr(prompt_text(tuple(Message(one["role"], str(one.get("content"))) for one in chats[0])))
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer has no chat template to write the chat {shown} with; use a model that has one, "
            "or prompts and observations that are text"
        )
    schemas: list[Any] = [get_json_schema(tool) for tool in tools]
    try:
        texts = tokenizer.apply_chat_template(
            list(chats), tools=schemas or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a stranger's template may raise anything
        shown = shown if len(chats) == 1 else "a prompt"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"the tokenizer's chat template refuses {shown}: {reason:.300}; change the messages, or use "
            "another model"
        ) from error
    return cast(list[str], texts)


def after_turn(
    tokenizer: PreTrainedTokenizerBase,
    following: Chat,
    tool: str = "",
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return what the chat template writes after a turn: its end, what follows, and what opens the next turn.

    Args:
        tool: the turn calls this one, as `tool_calls`; empty: it is a text.
    """
    turn: dict[str, Any] = {"role": "assistant", "content": TURN}
    if tool:
        call = {"name": tool, "arguments": {"text": TURN}}
        turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    (text,) = render(tokenizer, [[_QUESTION, turn, *following]], add_generation_prompt=add_generation_prompt)
    return text.partition(TURN)[2]


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
    if RESULT in written[""]:
        return RESULT in written["tool"] and not written["tool"].endswith(written[""])
    if RESULT in written["tool"]:
        return True
    raise ValueError(
        f"the tokenizer's chat template shows no messages of the role {role!r} after a turn ({reason}); use "
        "another role, such as user, or another model"
    )


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens with which the chat template closes the last turn, and one that the user answers.

    They are the same but for few templates: gpt-oss has `<|return|>` and `<|end|>`. They are empty without a
    template, and where it writes no special token there, as GLM.
    """
    if tokenizer.chat_template is None:
        return (), ()
    return _turn_ends(tokenizer, str(tokenizer.chat_template), len(tokenizer))


@lru_cache(maxsize=16)
def _turn_ends(
    tokenizer: PreTrainedTokenizerBase, template: str, n_tokens: int
) -> tuple[Sequence[int], Sequence[int]]:
    def written(following: Chat, *, opens: bool) -> Sequence[int]:
        try:
            text = after_turn(tokenizer, following, add_generation_prompt=opens)
        except ValueError:
            return ()
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    special = special_ids(tokenizer)
    last, answered = written([], opens=False), written([_QUESTION], opens=True)
    always_opens = last == written([], opens=True)  # a next turn, which may begin as that of the user
    shared = shared_start(last, answered) or ([] if always_opens else last)
    first = next((n for n, id_ in enumerate(shared) if id_ in special), len(shared))
    n_ends = len([*takewhile(special.__contains__, shared[first:])])
    if always_opens and len(shared) < len(last):
        n_ends = min(n_ends, 1)
    end = shared[: first + n_ends] if n_ends else ()
    between = answered[: len(end)]
    return end, between if special.issuperset({*between} - {*end}) else ()


@lru_cache(maxsize=64)
def check_rendering(template: str, variables: str) -> None:
    """Render short chats in a process with limits, before a stranger's template is rendered in this one.

    Args:
        variables: of the template, as JSON.

    Raises:
        ValueError: the template takes too much time, memory or text.
    """
    asked, answer = Message("user", "What is 2 * 3? " * 20), Message("assistant", "6")
    chats = [as_chat(chat) for chat in ([asked], [asked, answer], [asked, answer, asked])]
    job = {"template": template, "variables": json.loads(variables), "chats": chats, **LIMITS}
    # The worker's limit is of processor time: another one may keep it waiting.
    done = subprocess.run(
        [sys.executable, "-P", str(TEMPLATE)], input=json.dumps(job), capture_output=True, text=True
    )
    if done.returncode != 0:
        took_s = LIMITS["limit_s"]
        reason = f"it takes more than {took_s} s" if done.returncode < 0 else done.stderr.strip()[-300:]
        raise ValueError(f"the tokenizer's chat template refuses a short chat: {reason}; use another model")
