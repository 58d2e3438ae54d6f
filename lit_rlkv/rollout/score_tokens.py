"""score_tokens(): log-probs of given texts under an evicting, quantized or dense cache, token by token."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.checks import check_temperature
from lit_rlkv.kernels.token_logps.reference import chosen_logps
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.cast_linear import cache_cast_weights
from lit_rlkv.models.packed_linear import packed_weights
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.rollout.generate import STOP_CHECK_EVERY, as_rollout, check_prompts, check_token
from lit_rlkv.settings import Sampling
from lit_rlkv.types import Rollout


class _GivenTokens(Decoder):
    """Decoder that takes given tokens in place of sampled ones."""

    given: Int[Tensor, "row new"]
    n_given: Int[Tensor, " row"]
    on_logits: Callable[[Tensor], object] | None

    def _choose(
        self, rows: Int[Tensor, " row"], logits: Float[Tensor, "row vocab"]
    ) -> tuple[Tensor, Tensor, None]:
        if self.on_logits is not None:
            self.on_logits(logits)
        place = self._next_place(rows).clamp(max=self.given.shape[1] - 1)
        token = self.given[rows, place]
        return token, chosen_logps(logits, token, self.settings.sampling.temperature), None

    def _append(self, rows: Int[Tensor, " row"], logits: Float[Tensor, "row vocab"]) -> None:
        super()._append(rows, logits)
        self.is_running[rows] = self.is_running[rows] & (self._next_place(rows) + 1 < self.n_given[rows])

    def _next_place(self, rows: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        return self.kv.column[rows] + 1 - (self.seq_len - self.settings.max_new_tokens)


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

    `rollout_logps` are those of the cache, for example for a perplexity under it: exp of the mean of
    `-rollout_logps[response_mask]`. To score a whole text, its first token can be the prompt.

    Args:
        model, cache, temperature, generator, prefill_chunk: see `generate`; greedy is no distribution.
        input_ids, attention_mask: left-padded prompts.
        response_ids: right-padded tokens after the prompts.
        response_mask: True or 1 on tokens, at least one in each row; None: no padding.
        on_logits: called with the logits of each step, of all rows; it forbids CUDA graphs.

    Raises:
        ValueError: as `generate`; or responses and prompts have other rows, or a response has no token, or is
            not right-padded.
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
            "response_ids must be torch.long, a right-padded row for each prompt, and response_mask 1...1 "
            f"0...0 on it with at least one token, got {response_ids.dtype} {tuple(response_ids.shape)} and "
            f"{tuple(is_given.shape)} for {len(input_ids)} prompts"
        )
    for token in map(int, response_ids[is_given].aminmax()):
        check_token(model, "response_ids", token)
    n_rows, n_new = response_ids.shape
    no_end = response_ids.new_empty(0)
    settings = DecodeSettings(n_new, no_end, int(response_ids[0, 0]), Sampling(temperature))
    decoder = _GivenTokens(
        model,
        cache,
        n_rows,
        input_ids.shape[1],
        settings,
        generator,
        cuda_graph=None if on_logits is None else False,
        prefill_chunk=prefill_chunk,
    )
    decoder.given, decoder.n_given, decoder.on_logits = response_ids, is_given.sum(dim=1), on_logits
    with torch.cuda.device_of(input_ids), cache_cast_weights(model), packed_weights(model, n_rows):  # type: ignore[no-untyped-call]
        decoder.prefill(range(n_rows), input_ids, is_prompt)
        for step in range(n_new - 1):
            if step % STOP_CHECK_EVERY == 0:
                decoder.make_room(STOP_CHECK_EVERY)
            decoder.step()
    return as_rollout(decoder, decoder.read_rows(range(n_rows)), is_prompt)
