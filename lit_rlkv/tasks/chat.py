"""Texts and chat messages as a user's rows hold them."""

import reprlib
from typing import Any

from lit_rlkv.types import Message, Prompt

_ROLES = ("system", "user", "assistant")


def text_or_chat(value: Any, key: str) -> Prompt:
    """A text as it is, or messages like `{"role": "user", "content": "..."}`.

    Raises:
        ValueError: neither of them, or a role that a chat does not have; `key` says where.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(
            f"{key} is {reprlib.repr(value)}, which is neither a text nor chat messages; write text in "
            'quotes, or a list of messages like {"role": "user", "content": "..."}'
        )
    unknown = sorted({message["role"] for message in value} - set(_ROLES))
    if unknown:
        raise ValueError(
            f"{key} has messages of role {', '.join(map(repr, unknown))}; a chat has {', '.join(_ROLES)} only"
        )
    return tuple(Message(message["role"], message["content"]) for message in value)


def answerable(prompt: Prompt) -> Prompt:
    """The prompt, if it ends in something that the user says.

    Raises:
        ValueError: it ends in another role, or in nothing.
    """
    last = Message("user", prompt) if isinstance(prompt, str) else prompt[-1]
    if last.role != "user":
        raise ValueError(f"the prompt ends in a message of role {last.role!r}; end it in one of the user")
    if not last.content.strip():
        raise ValueError("the prompt is empty; drop the line or mend it")
    return prompt


def with_system(prompt: Prompt, system: str | None) -> Prompt:
    """The prompt behind a system message, unless it brings its own; None leaves it as it is."""
    if system is None:
        return prompt
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return chat if chat[0].role == "system" else (Message("system", system), *chat)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
