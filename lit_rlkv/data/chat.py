"""Conversations to token ids: prompts, and what stands between turns, for rollouts and SFT alike."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from lit_rlkv.data.chat_template import (
    Tool,
    after_turn,
    as_chat,
    follows_calls,
    render,
    shared_start,
    special_ids,
    turn_ends,
)
from lit_rlkv.data.tokenizers import (
    check_encodable,
    encodable,
    encode,
    end_token_ids,
    plain_ids,
)
from lit_rlkv.types import Message, Prompt, PromptBatch

Observation = str | Sequence[Message]
"""A text, which is a message of the user in a chat template, or messages."""
Observe = Callable[[str, str], Observation] | None
"""Returns the observation after a worked turn, given the turn and the observation's text; None: the text."""


def format_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tools: Sequence[Tool] = ()) -> str:
    """Return the prompt in the tokenizer's chat template, up to the start of the assistant's answer.

    A text is one user message, or stays as it is without a template.

    Args:
        tools: functions that the template describes to the model, if it can.
    """
    if tokenizer.chat_template is None and isinstance(prompt, str):
        return prompt
    return render(tokenizer, as_chat(prompt), tools)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tools: Sequence[Tool] = ()
) -> list[int]:
    """Return the token ids of a formatted prompt, with opening tokens unless a chat template wrote them."""
    text = format_prompt(tokenizer, prompt, tools)
    for message in as_chat(prompt):
        check_encodable(tokenizer, message["content"])
    has_template = tokenizer.chat_template is not None
    try:
        input_ids: list[int] = tokenizer.encode(text, add_special_tokens=not has_template)
    except Exception as error:  # tokenizers raises it for characters of the template without a token
        raise ValueError(f"the tokenizer cannot encode the prompt {text!r:.200}: {error}") from error
    if not input_ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens; make it longer")
    while not has_template and len(input_ids) > 1 and input_ids[-1] in end_token_ids(tokenizer):
        input_ids.pop()  # as of `add_eos_token=True`: the prompt has to go on
    return input_ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], tools: Sequence[Tool] = ()
) -> PromptBatch:
    """Return the prompts as in `encode_prompt`, left-padded to the longest."""
    if not prompts:
        raise ValueError("prompts must not be an empty list; give at least one")
    rows = [encode_prompt(tokenizer, prompt, tools) for prompt in prompts]
    width = max(len(row) for row in rows)
    input_ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
    n_tokens = torch.tensor([len(row) for row in rows])
    return PromptBatch(input_ids, torch.arange(width) >= width - n_tokens[:, None])


def as_messages(observation: Observation) -> list[Message]:
    """Return an observation as messages; a text is one of the user."""
    return [Message("user", observation)] if isinstance(observation, str) else list(observation)


def encode_observation(
    tokenizer: PreTrainedTokenizerBase, observation: Observation, turn: Sequence[int] | None = None
) -> list[int]:
    """Return the tokens between a turn that was sampled and the next one.

    They are those that the chat template writes there: the end of the turn, so far as it was not sampled, the
    observation as messages, and the start of the assistant's answer. Without a template they are those of its
    text. A character that the tokenizer lacks is replaced.

    Args:
        turn: tokens of the turn with its end; None: it ended as the template ends it.

    Raises:
        ValueError: a text has no tokens, or the template refuses a message or leaves it out.
    """
    written, end = _written_after(tokenizer, observation)
    token_ids = _unsampled(tokenizer, written, end if turn is None else turn)
    if not token_ids:
        raise ValueError(f"the observation {observation!r} has no tokens; make it longer")
    return token_ids


def encode_response(
    tokenizer: PreTrainedTokenizerBase, solution: str, turns: Sequence[str], observe: Observe
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a worked response, and True on those that the model says: turns and their ends.

    Args:
        turns: what comes before the solution: a response and the text of its observation, and so on.
    """
    token_ids: list[int] = []
    is_said: list[bool] = []
    for response, text in zip(turns[::2], turns[1::2], strict=True):
        written, _ = _written_after(tokenizer, observe(response, text) if observe else text)
        said = [*encode(tokenizer, response), *_taught_end(tokenizer, written)]
        given = _unsampled(tokenizer, written, said)
        token_ids += [*said, *given]
        is_said += [*[True] * len(said), *[False] * len(given)]
    said = [*encode(tokenizer, solution), *last_end(tokenizer)]
    return [*token_ids, *said], [*is_said, *[True] * len(said)]


def last_end(tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """Return the tokens that close the last turn: those of the chat template, or the end token."""
    return turn_ends(tokenizer)[0] or (tokenizer.eos_token_id,)


def _written_after(
    tokenizer: PreTrainedTokenizerBase, observation: Observation
) -> tuple[list[int], Sequence[int]]:
    """Return the tokens that the chat template writes after the text of a turn, and which of them end it."""
    if tokenizer.chat_template is None and isinstance(observation, str):
        return plain_ids(tokenizer, encodable(tokenizer, observation)), last_end(tokenizer)
    chat = as_chat(observation)
    for message in chat:
        message["content"] = encodable(tokenizer, message["content"])
    if not max(follows_calls(tokenizer, message["role"]) for message in chat):
        return plain_ids(tokenizer, after_turn(tokenizer, chat)), last_end(tokenizer)
    tool = chat[0].get("name", "tool")
    written = plain_ids(tokenizer, after_turn(tokenizer, chat, tool))
    alone = plain_ids(tokenizer, after_turn(tokenizer, [], tool, opens=False))
    # Both begin with what closes the call, which is text of the turn, and with the end of the turn.
    shared, special = shared_start(written, alone), special_ids(tokenizer)
    n_text = max((n for n, id_ in enumerate(shared) if id_ in special), default=len(shared))
    return written[n_text:], written[n_text : len(shared)]


def _taught_end(tokenizer: PreTrainedTokenizerBase, written: Sequence[int]) -> Sequence[int]:
    """Return the end of a worked turn: the template's, if rollouts end turns at it."""
    between, ends = turn_ends(tokenizer)[1], end_token_ids(tokenizer)
    for end in (between, written[:1]):
        if end and [*written[: len(end)]] == [*end] and end[-1] in ends:
            return end
    return last_end(tokenizer)


def _unsampled(tokenizer: PreTrainedTokenizerBase, written: list[int], turn: Sequence[int]) -> list[int]:
    """Return what a template writes after a turn without the tokens with which the turn has ended."""
    between = [*turn_ends(tokenizer)[1]]
    for n_tokens in range(min(len(turn), max(1, len(between))), 0, -1):
        if [*turn[-n_tokens:]] == written[:n_tokens]:
            return written[n_tokens:]
    # Another end, as of a text: it stands in place of the template's.
    is_ended = bool(turn) and turn[-1] in end_token_ids(tokenizer)
    return written[len(between) :] if is_ended and written[: len(between)] == between else written
