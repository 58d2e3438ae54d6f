"""generate(): prompts in, rollouts out; rows of the cache that come free take the prompts that wait."""

from collections import deque
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import can_be_captured, check_length, n_embedded
from lit_rlkv.models.rounding import rounding_once
from lit_rlkv.rollout.decoder import Decoder, Rows, Stopping
from lit_rlkv.types import NEVER, Rollout

STOP_CHECK_EVERY = 16
"""Steps between looks at which rows are done: on an accelerator each look waits for the device."""


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch prompt"],
    attention_mask: Tensor,
    *,
    cache: CacheSpec,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    n_samples: int = 1,
    max_rows: int | None = None,
    cuda_graph: bool | None = None,
) -> Rollout:
    """Sample responses to each prompt from a cache of fixed size, and record what the sampler saw.

    Args:
        model: from `prepare_backbone`.
        input_ids: left-padded prompts; `attention_mask` as in transformers, 0 or False on padding.
        eos_token_id: token or tokens that end a response and belong to it; None to always write all tokens.
        temperature: of the softmax; 0 decodes greedily, and every log-prob is 0, that of a certain event.
        generator: on the model's device; the same state gives the same rollout.
        n_samples: responses to each prompt, which is prefilled once for all of them. They stand side by side:
            row `i * n_samples + j` of the rollout is response j to prompt i.
        max_rows: most responses under way at a time, which bounds the cache; a prompt waits until all its
            samples find a row. None runs them all at once.
        cuda_graph: capture the decode step; None does on CUDA, where the model can be captured.

    Raises:
        ValueError: prompts that are empty or not left-padded, or too long for the model; no row for the
            samples of a prompt; a step that cannot be captured.
    """
    is_prompt = attention_mask.bool()
    _check_prompts(model, input_ids, is_prompt, max_new_tokens, temperature)
    _check_rows(n_samples, max_rows, cuda_graph, input_ids.device)
    eos_list = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or [])
    decoder = Decoder(
        model,
        cache,
        rows_under_way(len(input_ids), n_samples, max_rows),
        input_ids.shape[1],
        Stopping(
            max_new_tokens=max_new_tokens,
            eos_ids=torch.tensor(eos_list, dtype=torch.long, device=input_ids.device),
            pad_id=pad_token_id,
            temperature=temperature,
        ),
        generator,
        cuda_graph=input_ids.is_cuda and can_be_captured(model) if cuda_graph is None else cuda_graph,
    )
    # Graphs are the current device's.
    with torch.cuda.device_of(input_ids), rounding_once(model):  # type: ignore[no-untyped-call]
        rows = _decode_all(decoder, input_ids, is_prompt, n_samples)
    kv_bytes = decoder.kv.kv_bytes
    del decoder  # its cache makes room for what follows
    return _trim(rows, is_prompt.repeat_interleave(n_samples, dim=0), kv_bytes)


def _decode_all(
    decoder: Decoder,
    input_ids: Int[Tensor, "batch prompt"],
    is_prompt: Bool[Tensor, "batch prompt"],
    n_samples: int,
) -> Rows:
    """All samples to their end, in the order of their prompts."""
    check_every = STOP_CHECK_EVERY if input_ids.is_cuda else 1
    waiting = deque(range(len(input_ids)))
    free = deque(range(decoder.n_rows))
    owner: dict[int, int] = {}
    n_left: dict[int, int] = {}
    everyone: Rows | None = None
    while waiting or owner:
        prompts = [waiting.popleft() for _ in range(min(len(waiting), len(free) // n_samples))]
        if prompts:
            rows = [free.popleft() for _ in range(len(prompts) * n_samples)]
            decoder.admit(rows, input_ids[prompts], is_prompt[prompts])
            samples = [prompt * n_samples + j for prompt in prompts for j in range(n_samples)]
            owner |= zip(rows, samples, strict=True)
            n_left |= dict.fromkeys(rows, decoder.stopping.max_new_tokens - 1)
        n_steps = min(check_every, max(n_left[row] for row in owner))
        for _ in range(n_steps):
            decoder.step()
        n_left = {row: n - n_steps for row, n in n_left.items()}
        is_running = decoder.is_running.tolist()
        done = [row for row in owner if not is_running[row]]
        assert done or n_steps > 0  # else it would go on for ever
        decoder.kv.levels.stop(done)
        if done and (waiting or len(done) == len(owner)):
            taken, places = decoder.take(done), [owner.pop(row) for row in done]
            if len(places) == n_samples * len(input_ids):
                return taken  # all of them at once, and so in their order
            # Each wave to its place, because a copy of all records of evictions is what memory may not have.
            everyone = everyone or taken.blank(n_samples * len(input_ids))
            everyone.put(places, taken)
            free.extend(done)
    assert everyone is not None
    return everyone


def rows_under_way(n_prompts: int, n_samples: int, max_rows: int | None) -> int:
    """Rows of the cache for so many samples of each prompt; those of one prompt start together."""
    n_rows = n_prompts * n_samples
    return n_rows if max_rows is None else min(n_rows, max_rows // n_samples * n_samples)


def _trim(rows: Rows, is_prompt: Bool[Tensor, "batch prompt"], kv_bytes: int) -> Rollout:
    """Cut the unused columns, and forget evictions after the last query that predicted an action of the row."""
    end = int(rows.response_mask.any(dim=0).nonzero().max()) + 1
    response_mask = rows.response_mask[:, :end]
    attention_mask = response_mask.clone()
    attention_mask[:, : is_prompt.shape[1]] = is_prompt
    column = torch.arange(end, device=is_prompt.device)
    last_action = (column * response_mask).amax(dim=1)
    evicted_at = rows.evicted_at[..., :end]  # ours alone, and large: changed in place
    evicted_at.masked_fill_(evicted_at > last_action[:, None, None, None] - 1, NEVER)
    evicted_at.masked_fill_(~attention_mask[:, None, None], 0)
    return Rollout(
        input_ids=rows.input_ids[:, :end],
        attention_mask=attention_mask,
        response_mask=response_mask,
        rollout_logps=rows.logps[:, :end],
        evicted_at=evicted_at,
        kv_bytes=kv_bytes,
    )


def _check_prompts(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch prompt"],
    is_prompt: Tensor,
    max_new_tokens: int,
    temperature: float,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} leaves nothing to sample; give at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative; use 0 for greedy decoding, else above 0")
    if is_prompt.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(is_prompt.shape)} but input_ids {tuple(input_ids.shape)}; "
            "give one entry for each token"
        )
    if input_ids.numel() == 0:
        raise ValueError(
            f"input_ids of shape {tuple(input_ids.shape)} hold no prompt; give at least one token"
        )
    if not is_prompt[:, -1].all() or (is_prompt[:, 1:] < is_prompt[:, :-1]).any():
        raise ValueError(
            "a prompt is empty or not left-padded; put padding first, so that each row of attention_mask "
            "reads 0...0 1...1"
        )
    if (highest := int(input_ids.max())) >= n_embedded(model):
        raise ValueError(
            f"a prompt holds token {highest}, but {type(model).__name__} embeds {n_embedded(model)} tokens; "
            "its tokenizer belongs to another model, or has tokens that the model was never given"
        )
    check_length(model, input_ids.shape[1] + max_new_tokens)


def _check_rows(n_samples: int, max_rows: int | None, cuda_graph: bool | None, device: torch.device) -> None:
    if n_samples < 1:
        raise ValueError(f"n_samples={n_samples} asks for no response; give at least 1")
    if max_rows is not None and max_rows < n_samples:
        raise ValueError(
            f"max_rows={max_rows} has no room for the {n_samples} samples of one prompt, which start "
            f"together; give at least {n_samples}"
        )
    if cuda_graph and device.type != "cuda":
        raise ValueError(
            f"cuda_graph=true needs a model on CUDA, and this one is on {device.type}; leave it at its "
            "default, which captures where it can"
        )
