"""generate(): sample responses to prompts under an evicting cache, with continuous batching."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.checks import Range, is_whole
from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.decode_attention.launch import MAX_SPLITS
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import check_length, n_embeddings
from lit_rlkv.models.cast_linear import cache_cast_weights
from lit_rlkv.models.packed_linear import packed_weights
from lit_rlkv.rollout.decode_loop import FinishedCallback, OnFinished, decode_all
from lit_rlkv.rollout.decoder import DecodedRows, Decoder, DecodeSettings
from lit_rlkv.rollout.recorders import HOST
from lit_rlkv.rollout.turns import Conversations, Turns
from lit_rlkv.settings import Sampling
from lit_rlkv.types import Record, Rollout

STOP_CHECK_EVERY = 16
"""Most decode steps between checks for finished rows; on CUDA each check waits for the device."""


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch prompt"],
    attention_mask: Tensor,
    *,
    cache: CacheSpec,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | int = 1.0,
    min_p: float | int | None = None,
    generator: torch.Generator | None = None,
    num_return_sequences: int = 1,
    max_rows: int | None = None,
    cuda_graph: bool | None = None,
    n_splits: int | None = None,
    compile_layers: bool = False,
    record_routing: bool = False,
    prefill_chunk: int | None = None,
    on_progress: Callable[[int], object] | None = None,
    on_finished: OnFinished | None = None,
    conversations: Conversations | None = None,
) -> Rollout:
    """Sample responses to each prompt with a KV cache of fixed size, and record when each key was evicted.

    Args:
        model: model from `prepare_backbone`.
        input_ids: left-padded prompts.
        attention_mask: as in transformers, 0 or False on padding.
        eos_token_id: token or tokens that end a response, included in it; None: always `max_new_tokens`.
        pad_token_id: token after the end of a response; None: the first of `eos_token_id`, as in
            transformers.
        temperature: temperature of the softmax; 0 decodes greedily, with log-prob 0 for every token.
        top_k, top_p, min_p: sample from likely tokens only, as in transformers and in its order; see
            `lit_rlkv.settings.Sampling`. Log-probs are of the renormalised distribution, and the
            rollout records the tokens that were left, `sampling_masks`.
        generator: random numbers, on the model's device; the same state gives the same rollout.
        num_return_sequences: responses to each prompt, which is prefilled once for all of them. Response j to
            prompt i is row `i * num_return_sequences + j` of the rollout.
        max_rows: most sequences to decode at a time, which bounds the memory of the cache. A prompt waits
            until there are free rows for all its responses. None decodes all at once.
        cuda_graph: capture the decode step as a CUDA graph; None: on CUDA, if it can be captured. If the
            capture fails, a warning is logged and steps run without a graph.
        n_splits: parts of a row's cache that the decode attention kernel reads in parallel, at most 128.
            None: more parts for fewer rows, so that the rounding of attention depends on their number.
        compile_layers: run decode steps with decoder layers fused by torch.compile; prefill stays eager.
        record_routing: record the experts that the routers of a mixture of experts choose for each token, for
            the learner to take the same.
        prefill_chunk: most tokens of a prompt in one forward, which bounds the memory of prefill. Chunks are
            counted from the prompt's end. After each of them a prompt above the budget is compacted to it, so
            that later chunks see what is left. None: each prompt in one piece.
        on_progress: called during decoding with the number of tokens since the last call, as tqdm's `update`.
            A response that ends early counts in full, so the numbers add up to
            `batch * num_return_sequences * max_new_tokens`.
        on_finished: called during decoding with responses that have ended, each once and in no fixed order:
            their rows in the rollout, `input_ids` [row, seq] and `response_mask` [row, seq] on the CPU. seq
            is the longest prompt plus `max_new_tokens`, of which the rollout cuts unused columns.
        conversations: environments of the responses. An end token then ends a turn, and the response goes on
            after the tokens of the observation, of which there is no log-prob; `max_new_tokens` counts both.
            Other responses are decoded while one waits. The order in which answers come decides which random
            numbers a response gets, so equal answers at other times give another rollout.

    Raises:
        ValueError: a prompt is empty, not left-padded or too long for the model; a token is not in its
            vocabulary; a number is out of its range; `max_rows` is below `num_return_sequences`; there is
            neither a pad nor an end token; `cuda_graph` is True and the decode step cannot be captured;
            `n_splits` is not between 1 and 128, or the kernel that it is for does not run;
            `record_routing` is True and the model has no routing that can be replayed; or dropout or the
            noise of NEFTune is active.
    """
    if not isinstance(cache, CacheSpec):
        raise ValueError(
            f"cache must be a CacheSpec, got {cache!r}; give CacheSpec('snapkv', budget=512), for example"
        )
    if not isinstance(generator, torch.Generator | None):
        raise ValueError(
            f"generator must be a torch.Generator or None, got {generator!r}; give "
            "torch.Generator(device).manual_seed(0)"
        )
    is_prompt = attention_mask.bool()
    sampling = Sampling(temperature, top_k, top_p, min_p)
    check_prompts(model, input_ids, is_prompt, max_new_tokens)
    _check_rows(num_return_sequences, max_rows, cuda_graph, input_ids.device)
    if prefill_chunk is not None:
        Range(least=1).check("prefill_chunk", prefill_chunk, int, hint="None reads a prompt in one piece")
    _check_splits(n_splits, torch.empty(0, dtype=model.dtype, device=input_ids.device))
    eos_list, given_pad = _token_list("eos_token_id", eos_token_id), _token_list("pad_token_id", pad_token_id)
    pad_list = given_pad or eos_list[:1]
    if not pad_list:
        raise ValueError("pad_token_id must be given where there is no eos_token_id; give any token id")
    # A token beyond the vocabulary is never sampled, and ends no response.
    Range(least=0).check("eos_token_id", min(eos_list, default=0), int, hint="None never ends a response")
    check_token(model, "pad_token_id", pad_list[0])
    decoder = Decoder(
        model,
        cache,
        n_concurrent_rows(len(input_ids), num_return_sequences, max_rows),
        input_ids.shape[1],
        DecodeSettings(
            max_new_tokens=max_new_tokens,
            eos_token_ids=torch.tensor(eos_list, dtype=torch.long, device=input_ids.device),
            pad_token_id=pad_list[0],
            sampling=sampling,
        ),
        generator,
        cuda_graph=cuda_graph,
        n_splits=n_splits,
        compile_layers=compile_layers,
        record_routing=record_routing,
        prefill_chunk=prefill_chunk,
    )
    with decoding(decoder):
        # A row that waits is put aside before the next step writes over it.
        check_every = STOP_CHECK_EVERY if input_ids.is_cuda and conversations is None else 1
        callback = None if on_finished is None else FinishedCallback(decoder, on_finished)
        turns = None if conversations is None else Turns(decoder, conversations)
        rows = decode_all(
            decoder, input_ids, is_prompt, num_return_sequences, check_every, on_progress, callback, turns
        )
    if callback is not None:
        callback.call()
    return as_rollout(decoder, rows, is_prompt.repeat_interleave(num_return_sequences, dim=0))


@contextmanager
def decoding(decoder: Decoder) -> Iterator[None]:
    """Cast and pack the weights for decode steps within a block."""
    # A CUDA graph is captured on the current device.
    with (
        torch.cuda.device_of(decoder.newest),  # type: ignore[no-untyped-call]
        cache_cast_weights(decoder.model),
        # A compiled layer would be compiled anew for the packed weights of every rollout.
        nullcontext() if decoder.keeps_rows else packed_weights(decoder.model, decoder.n_rows),
    ):
        yield


def _token_list(name: str, ids: Any) -> list[int]:
    """Return token ids that are a number, a sequence, a tensor or an array, as a list; empty for None."""
    try:
        found = torch.as_tensor([] if ids is None else ids).flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a token id, or several, got {ids!r}") from error
    if found.numel() and (found.is_floating_point() or found.dtype == torch.bool):
        raise ValueError(f"{name} must be whole numbers, got {ids!r}; give token ids")
    return [int(each) for each in found.tolist()]


def n_concurrent_rows(n_prompts: int, num_return_sequences: int, max_rows: int | None) -> int:
    """Return the number of rows to decode at a time; all responses to a prompt start together."""
    n_rows = n_prompts * num_return_sequences
    return (
        n_rows if max_rows is None else min(n_rows, max_rows // num_return_sequences * num_return_sequences)
    )


def as_rollout(
    decoder: Decoder, rows: DecodedRows, is_prompt: Bool[Tensor, "batch prompt"], last: Tensor | None = None
) -> Rollout:
    """Cut the unused columns of decoded rows, and free the decoder's cache.

    All tokens up to column `last` of each row, or the last sampled one, are of the sequence; those that were
    given are not in `response_mask`.
    """
    kv_bytes = decoder.kv.kv_bytes
    for layer in decoder.kv.slot_layers:
        layer.pools = None
    if last is None:
        last = (torch.arange(decoder.seq_len, device=is_prompt.device) * rows.response_mask).amax(dim=1)
    end = int(last.max()) + 1

    def cut(value: Tensor) -> Tensor:
        part = value[..., :end]
        return part.clone() if 2 * end < value.shape[-1] else part  # a view holds the unused columns, too

    rows = rows.map_tensors(cut)
    attention_mask = torch.arange(end, device=is_prompt.device) <= last[:, None]
    attention_mask[:, : is_prompt.shape[1]] = is_prompt
    masks = attention_mask.to(HOST), rows.response_mask.to(HOST)
    parts = {one.part: one.finish(rows.parts[one.part], *masks) for one in decoder.recorders}
    return Rollout(
        input_ids=rows.input_ids,
        attention_mask=attention_mask,
        response_mask=rows.response_mask,
        rollout_logps=rows.logps,
        record=Record(**parts),
        kv_bytes=kv_bytes,
        temperature=decoder.settings.sampling.temperature,
    )


def check_prompts(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch prompt"],
    is_prompt: Tensor,
    max_new_tokens: int,
) -> None:
    """Check left-padded prompts."""
    if input_ids.ndim != 2 or input_ids.dtype != torch.long:
        raise ValueError(
            f"input_ids must be a torch.long tensor [batch, prompt], got {input_ids.dtype} of shape "
            f"{tuple(input_ids.shape)}; take them from tokenizer(texts, return_tensors='pt')"
        )
    Range(least=1).check("max_new_tokens", max_new_tokens, int)
    if is_prompt.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(is_prompt.shape)}"
        )
    if input_ids.numel() == 0:
        raise ValueError(
            f"input_ids must hold at least one prompt of one token, got shape {tuple(input_ids.shape)}"
        )
    if not is_prompt[:, -1].all() or (is_prompt[:, 1:] < is_prompt[:, :-1]).any():
        raise ValueError(
            "a prompt is empty or not left-padded; put padding first, so that each row of attention_mask "
            "reads 0...0 1...1"
        )
    for token in map(int, input_ids.aminmax()):
        check_token(model, "a prompt", token)
    check_length(model, input_ids.shape[1] + max_new_tokens, "lower max_new_tokens or shorten the prompts")


def check_token(model: PreTrainedModel, name: str, token: int) -> None:
    """Check that a token is in the model's vocabulary."""
    n_tokens = n_embeddings(model)
    if not is_whole(token) or not 0 <= token < n_tokens:
        raise ValueError(
            f"{name} holds token {token}, but {type(model).__name__} has {n_tokens} embeddings, of "
            f"tokens 0 to {n_tokens - 1}; use the tokenizer of this model, or resize its embeddings"
        )


def _check_rows(
    num_return_sequences: int, max_rows: int | None, cuda_graph: bool | None, device: torch.device
) -> None:
    Range(least=1).check("num_return_sequences", num_return_sequences, int)
    if max_rows is not None:
        Range(least=1).check("max_rows", max_rows, int)
    if max_rows is not None and max_rows < num_return_sequences:
        raise ValueError(
            f"max_rows must be at least num_return_sequences={num_return_sequences}, got {max_rows}; all "
            "responses to a prompt start at the same time"
        )
    if cuda_graph and device.type != "cuda":
        raise ValueError(
            f"cuda_graph=true needs a model on CUDA, and this one is on {device.type}; use the default None, "
            "which captures where possible"
        )


def _check_splits(n_splits: int | None, like: Tensor) -> None:
    if n_splits is None:
        return
    if not 1 <= n_splits <= MAX_SPLITS:
        raise ValueError(f"n_splits must be 1 to {MAX_SPLITS}, got {n_splits}")
    if not uses_triton(like):
        raise ValueError(
            f"n_splits={n_splits} needs the Triton kernel of decode attention, which does not run on "
            f"{like.device.type} in {like.dtype}; use the default None"
        )
