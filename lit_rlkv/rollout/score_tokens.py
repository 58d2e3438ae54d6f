"""score_tokens(): log-probs of given texts under an evicting, quantized or dense cache, token by token."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from lit_rlkv.checks import check_temperature
from lit_rlkv.kernels.token_logps.reference import chosen_logps
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.rollout.generate import as_rollout, check_prompts, check_token, decoding
from lit_rlkv.settings import Sampling
from lit_rlkv.types import Rollout


class _GivenTokens(Decoder):
    """Decoder that takes given tokens in place of sampled ones."""

    given: Int[Tensor, "row column"]
    is_given: Bool[Tensor, "row column"]
    on_logits: Callable[[Tensor], object] | None

    def _choose(self, rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, None]:
        if self.on_logits is not None:
            self.on_logits(logits)
        token = self.given[rows, self.kv.column[rows] + 1]
        logps = chosen_logps(logits, token, self.settings.sampling.temperature)
        return token, logps.to(self.logps.dtype), None

    def _append(self, rows: Tensor, logits: Tensor) -> None:
        super()._append(rows, logits)
        self.is_running[rows] = self.is_running[rows] & self.is_given[rows, self.kv.column[rows] + 2]


@torch.no_grad()
def score_tokens(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch prompt"],
    attention_mask: Tensor,
    response_ids: Int[Tensor, "batch new"],
    response_mask: Tensor | None = None,
    *,
    cache: CacheSpec,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    prefill_chunk: int | None = None,
    on_logits: Callable[[Float[Tensor, "batch vocab"]], object] | None = None,
) -> Rollout:
    """Feed given responses to a cache as if they were sampled; return their log-probs and the record.

    The perplexity under the cache is exp of the mean of `-rollout_logps[response_mask]`. The prompt of a
    whole text can be its first token. Other arguments and errors are those of `generate`.

    Args:
        response_ids: right-padded tokens after the prompts.
        response_mask: True or 1 on tokens, at least one in each row; None: no padding.
        on_logits: called with the logits of each step, of all rows; it forbids CUDA graphs.
    """
    check_temperature("temperature", temperature, is_greedy_allowed=False)
    is_prompt = attention_mask.bool()
    is_given = torch.ones_like(response_ids).bool() if response_mask is None else response_mask.bool()
    check_prompts(model, input_ids, is_prompt, response_ids.shape[-1])
    if (
        response_ids.ndim != 2
        or response_ids.dtype != torch.long
        or is_given.shape != response_ids.shape
        or len(response_ids) != len(input_ids)
        or not is_given[:, 0].all()
        or (is_given[:, 1:] > is_given[:, :-1]).any()
    ):
        raise ValueError(
            "response_ids must be torch.long, a right-padded row of tokens for each prompt, and its mask "
            f"1...1 0...0, got {response_ids.dtype} {tuple(response_ids.shape)} for {len(input_ids)} prompts"
        )
    for token in map(int, response_ids[is_given].aminmax()):
        check_token(model, "response_ids", token)
    (n_rows, n_new), n_prompt = response_ids.shape, input_ids.shape[1]
    settings = DecodeSettings(n_new, response_ids.new_empty(0), 0, Sampling(temperature))
    graph = None if on_logits is None else False
    decoder = _GivenTokens(
        model, cache, n_rows, n_prompt, settings, generator, cuda_graph=graph, prefill_chunk=prefill_chunk
    )
    decoder.given, decoder.is_given = (F.pad(each, (n_prompt, 2)) for each in (response_ids, is_given))
    decoder.on_logits = on_logits
    with decoding(decoder):
        decoder.prefill(range(n_rows), input_ids, is_prompt)
        decoder.make_room(n_new)
        for _ in range(n_new - 1):
            decoder.step()
    return as_rollout(decoder, decoder.read_rows(range(n_rows)), is_prompt)
