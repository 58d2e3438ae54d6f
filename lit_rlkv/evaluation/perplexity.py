"""Perplexity of given texts under a cache: exp of the mean −log p of their tokens."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.tokenizers import check_encodable
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import check_length
from lit_rlkv.rollout import score_tokens
from lit_rlkv.tasks.rows import Table, read_rows

HINT = "evaluation.perplexity reads whole texts from a column of this name; rename yours"


def read_texts(dataset: str, tokenizer: PreTrainedTokenizerBase) -> Table[list[int]]:
    """Return the token ids of the column `text` of a file or dataset, with the tokenizer's opening tokens.

    Raises:
        ImportError: the package datasets is needed and missing.
        ValueError: there is no such data, or a text has fewer than two tokens or characters without a token.
    """

    def parse(row: dict[str, object]) -> list[int]:
        text = row["text"]
        if not isinstance(text, str):
            raise ValueError(f"text must be a text, got {text!r:.80}; write it in quotes")
        check_encodable(tokenizer, text)
        input_ids: list[int] = tokenizer.encode(text)
        if len(input_ids) < 2:
            raise ValueError(
                f"the text {text!r} has {len(input_ids)} tokens, and the first is not scored; drop the row"
            )
        return input_ids

    table = read_rows(dataset, parse, (("text", "text"),), hint=HINT)
    if not table.rows:
        raise ValueError(f"{dataset} has no rows; give at least one text")
    return table


def check_texts_fit(model: PreTrainedModel, texts: Table[list[int]]) -> None:
    """Raise a ValueError that names the longest text if the model has no positions for it."""
    n_tokens, place = max((len(row), place) for row, place in zip(texts.rows, texts.places, strict=True))
    try:
        check_length(model, n_tokens)
    except ValueError as error:
        raise ValueError(
            f"evaluation.perplexity: {error}; the longest text is {place} ({n_tokens} tokens)"
        ) from error


def summed_nll(
    model: PreTrainedModel, texts: Sequence[list[int]], cache: CacheSpec, generator: torch.Generator
) -> float:
    """Return the sum of −log p in nats over all tokens of all texts but each first, at temperature 1."""
    width = max(map(len, texts))
    input_ids = torch.tensor([[*row, *row[:1] * (width - len(row))] for row in texts], device=model.device)
    is_token = torch.arange(1, width) < torch.tensor([len(row) for row in texts])[:, None]
    first, rest, mask = input_ids[:, :1], input_ids[:, 1:], is_token.to(model.device)
    scored = score_tokens(model, first, torch.ones_like(first), rest, mask, cache=cache, generator=generator)
    return float(-scored.rollout_logps[scored.response_mask].double().sum())
