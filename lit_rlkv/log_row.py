"""LogRow: one sequence of another engine's log, checked, from which `Rollout.from_log` is made."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_LOGP = 1e-3
"""Largest log-prob that rounding explains."""


@dataclass(frozen=True)
class LogRow:
    """A sequence that another engine sampled: its tokens, their log-probs and its evictions.

    Positions count the tokens of the row from 0, without padding. All parts may be lists, arrays or tensors.

    Args:
        prompt_ids: tokens of the prompt, at least one.
        response_ids: tokens after the prompt, at least one.
        logps: log-prob of each response token under the distribution that it was sampled from, in nats.
        evicted_at: whole numbers [layer, kv_head, token], each the position of the first query that no longer
            sees the key, `NEVER` if all do, as `lit_rlkv.eviction_logs` makes them of what engines log. One
            layer or KV head serves all. None: nothing was evicted.
        is_sampled: False for response tokens that were given, such as results of tools; None: all sampled.

    Raises:
        ValueError: a part has another length or type than the tokens, a log-prob is none, or a key is evicted
            before its own query or after the end of the row.
    """

    prompt_ids: Any
    response_ids: Any
    logps: Any
    evicted_at: Any = None
    is_sampled: Any = None

    def __post_init__(self) -> None:
        prompt, response = _ids("prompt_ids", self.prompt_ids), _ids("response_ids", self.response_ids)
        given, times = self.is_sampled, self.evicted_at
        is_sampled = torch.ones(len(response)) if given is None else _tensor("is_sampled", given)
        if is_sampled.shape != response.shape or not is_sampled.any():
            raise ValueError(
                f"is_sampled must be bools of the {len(response)} response tokens, one of them True, "
                f"got {tuple(is_sampled.shape)}"
            )
        vars(self).update(
            prompt_ids=prompt,
            response_ids=response,
            logps=_response_logps(self.logps, is_sampled.bool()),
            evicted_at=None if times is None else _times(times, len(prompt) + len(response)),
            is_sampled=is_sampled.bool(),
        )


def _tensor(name: str, values: Any) -> Tensor:
    if values is None:
        raise ValueError(f"{name} is None; give a number for each token, or leave the row out")
    try:
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be numbers in equal rows, got {values!r:.80}: {error}") from None


def is_whole_numbers(values: Tensor) -> bool:
    """Return True for a tensor of integers; bools are none."""
    return not (values.is_floating_point() or values.dtype == torch.bool)


def _ids(name: str, values: Any) -> Int[Tensor, " token"]:
    ids = _tensor(name, values)
    if ids.ndim != 1 or len(ids) == 0 or not is_whole_numbers(ids):
        raise ValueError(f"{name} must be token ids, at least one, got {ids.dtype} {tuple(ids.shape)}")
    if (ids < 0).any():
        place = int((ids < 0).int().argmax())
        raise ValueError(f"{name} must be token ids, none below 0, got {int(ids[place])} for token {place}")
    return ids.long()


def _response_logps(values: Any, is_sampled: Bool[Tensor, " token"]) -> Float[Tensor, " token"]:
    is_list = isinstance(values, list | tuple)  # engines have None for tokens that they did not sample
    numbers = [float("nan") if value is None else value for value in values] if is_list else values
    logps = _tensor("logps", numbers)
    if logps.shape != is_sampled.shape:
        raise ValueError(
            f"logps must be one number for each of the {len(is_sampled)} response tokens, got "
            f"{tuple(logps.shape)}; leave out those of the prompt and of a token after the last"
        )
    logps = (logps if logps.is_floating_point() else logps.float()).masked_fill(~is_sampled, 0.0)
    is_wrong = ~(logps.isfinite() & (logps <= MAX_LOGP))
    if is_wrong.any():
        place = int(is_wrong.int().argmax())
        raise ValueError(
            "logps must be natural logarithms of probabilities, finite and at most 0, got "
            f"{values[place] if is_list else float(logps[place])} for token {place} of the response"
        )
    return logps


def _times(values: Any, n_tokens: int) -> Int[Tensor, "layer kv_head token"]:
    times, never = _tensor("evicted_at", values), torch.iinfo(torch.int32).max
    if not is_whole_numbers(times) or times.ndim != 3 or times.shape[2] != n_tokens or 0 in times.shape:
        raise ValueError(
            f"evicted_at must be whole numbers [layer, kv_head, token] of {n_tokens} tokens, those of prompt "
            f"and response without padding, got {times.dtype} {tuple(times.shape)}"
        )
    times = times.long()
    is_wrong = (times <= torch.arange(n_tokens)) | (times > n_tokens) & (times < never)
    if is_wrong.any():
        layer, head, key = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"evicted_at must be after the key's own position and at most {n_tokens}, the number of tokens, "
            f"or lit_rlkv.NEVER, got {int(times[layer, head, key])} for layer {layer}, KV head {head}, key "
            f"{key}; count positions from 0 and without padding"
        )
    return times.clamp(max=never).int()
