"""Prefills that are computed once: later caches are filled from stored queries, keys and values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from lit_rlkv.kvcache.layer import SlotLayer

Attended = tuple[Any, ...]
"""Arguments of SlotLayer.attend: query, key, value, scaling, softcap."""


class StoredPrefills:
    """Within `active`, a prefill of the latest prompts fills the cache without a forward of the model.

    A prefill is dense, so it depends on the dtype of the cache, and not on the policy or the budget. What
    each layer does with its keys still runs: attention, scores and the first compaction.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.prompts: tuple[bytes, bytes, str | None] | None = None
        self.layers: list[Attended] = []
        self.hidden: Tensor
        self.n_forwards = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Intercept the forward of the model's decoder stack within this block."""
        base = self.model.base_model
        plain = base.forward
        base.forward = self._wrap(plain)
        try:
            yield
        finally:
            base.forward = plain

    def _wrap(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **options: Any) -> Any:
            cache = options.get("slot_cache")
            if cache is None or cache.incoming is None:
                return plain(*args, **options)
            tokens = (options["input_ids"].numpy().tobytes(), cache.incoming.is_token.numpy().tobytes())
            prompts = (*tokens, cache.spec.dtype)
            if prompts != self.prompts:
                self.layers = []
                self.n_forwards += 1
                for layer in cache.slot_layers:
                    layer.attend = self._recording(layer)
                self.hidden = plain(*args, **options).last_hidden_state
                for layer in cache.slot_layers:
                    del layer.attend
                self.prompts = prompts
            else:
                for layer, attended in zip(cache.slot_layers, self.layers, strict=True):
                    layer.attend(*attended)
            return BaseModelOutputWithPast(last_hidden_state=self.hidden)

        return forward

    def _recording(self, layer: SlotLayer) -> Callable[..., Tensor]:
        attend = layer.attend

        def recording(*attended: Any) -> Tensor:
            self.layers.append(attended)
            return attend(*attended)

        return recording
