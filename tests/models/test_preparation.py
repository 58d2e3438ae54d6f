import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    DiffLlamaConfig,
    FalconMambaConfig,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
)

from lit_rlkv.kvcache.layer import SlotLayer
from lit_rlkv.models import attention, prepare_backbone
from tests.models_zoo import (
    FAMILIES,
    HEADS,
    HIDDEN,
    SIZE,
    VOCAB,
    build,
    ragged_prompts,
    tiny_config,
    tiny_model,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_supported_family_is_returned_itself(family: str):
    model = build(tiny_config(family))
    assert prepare_backbone(model) is model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DiffLlamaConfig(**SIZE), "a layer attends twice in one forward"),
        (
            FalconMambaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, state_size=4),
            "has no layer with attention",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else "",
)
def test_an_architecture_that_evictions_do_not_describe_is_refused_with_the_reason(
    config: PretrainedConfig, reason: str
):
    with pytest.raises(ValueError, match=f"cannot be replayed: .*{reason}"):
        prepare_backbone(build(config))


class Patched(nn.Module):
    """An MLP whose output is passed through something that does not belong there."""

    def __init__(self, mlp: nn.Module, patch: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.mlp, self.patch = mlp, patch

    def forward(self, hidden: Tensor) -> Tensor:
        return self.patch(self.mlp(hidden), self.training)


def patched_llama(patch: Callable[[Tensor, bool], Tensor]) -> PreTrainedModel:
    model = build(tiny_config("llama"))
    model.model.layers[1].mlp = Patched(model.model.layers[1].mlp, patch)
    return model


def test_a_model_whose_tokens_meet_outside_attention_is_refused():
    model = patched_llama(lambda hidden, is_training: hidden + hidden.cumsum(dim=1))
    with pytest.raises(ValueError, match="its logits change when it decodes from our cache"):
        prepare_backbone(model)


def test_a_model_whose_neighbours_meet_within_the_first_tokens_only_is_refused():
    # Columns 0 and 1 meet, so decoding the last of six shows nothing, and the isolated tokens do.
    def mix(hidden: Tensor, is_training: bool) -> Tensor:
        return torch.cat([hidden[:, :1], hidden[:, 1:2] + hidden[:, :1], hidden[:, 2:]], dim=1)

    with pytest.raises(ValueError, match="information flows between tokens outside causal attention"):
        prepare_backbone(patched_llama(mix))


def test_dropout_by_function_is_refused_because_it_cannot_be_switched_off():
    model = patched_llama(lambda hidden, is_training: F.dropout(hidden, 0.5, training=is_training))
    with pytest.raises(
        ValueError, match=r"in training mode; set any dropout that is not an nn\.Dropout to 0 in its config"
    ):
        prepare_backbone(model)


def patched_at(positions: slice, dtype: torch.dtype) -> PreTrainedModel:
    """A model with wrong logits at these positions in its second forward, as after a large rounding error."""
    n_forwards = 0

    def patch(hidden: Tensor, is_training: bool) -> Tensor:
        nonlocal n_forwards
        n_forwards += 1
        is_patched = torch.zeros(hidden.shape[1], 1, dtype=torch.bool)
        is_patched[positions] = n_forwards == 2
        return torch.where(is_patched, 10 * hidden.flip(-1), hidden)

    model = build(tiny_config("llama"))
    model.model.layers[-1].mlp = Patched(model.model.layers[-1].mlp, patch)
    return model.to(dtype)


def test_rounding_in_16_bit_may_change_the_logits_of_few_positions():
    prepare_backbone(patched_at(slice(2, 4), torch.bfloat16))
    with pytest.raises(ValueError, match="its logits change under our attention"):
        prepare_backbone(patched_at(slice(2, 4), torch.float32))
    with pytest.raises(ValueError, match="its logits change under our attention"):
        prepare_backbone(patched_at(slice(0, 6), torch.bfloat16))


def test_the_same_patch_that_does_nothing_is_accepted():
    prepare_backbone(patched_llama(lambda hidden, is_training: hidden))


def without_cap(attend: Callable[..., Any]) -> Callable[..., Any]:
    """The same attention, whose softcap is forgotten on the way."""

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        if "softcap" in kwargs:
            return attend(*args, **kwargs | {"softcap": None})
        bound = inspect.signature(attend).bind(*args, **kwargs)
        bound.arguments["softcap"] = None
        return attend(*bound.args, **bound.kwargs)

    return forgetful


IN_PREFILL = (SlotLayer, "_feed")
IN_DECODING = (SlotLayer, "_decode")
IN_CACHE = (SlotLayer, "attend")
IN_REPLAY = (attention, "shadow_attention")


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([IN_PREFILL], "its logits change when it decodes from our cache"),
        ([IN_DECODING], "its logits change when it decodes from our cache"),
        ([IN_CACHE], "its logits change when it decodes from our cache"),
        ([IN_REPLAY], "its logits change under our attention"),
        ([IN_CACHE, IN_REPLAY], "its logits change under our attention"),
    ],
    ids=["in prefill", "in decoding", "in the cache", "in replay", "in cache and replay"],
)
def test_a_model_whose_cap_on_logits_is_forgotten_is_refused(
    places: list[tuple[Any, str]], reason: str, monkeypatch: pytest.MonkeyPatch
):
    for owner, name in places:
        monkeypatch.setattr(owner, name, without_cap(getattr(owner, name)))
    prepare_backbone(build(tiny_config("gemma2", attn_logit_softcapping=None)))
    with pytest.raises(ValueError, match=f"cannot be replayed: {reason}"):
        prepare_backbone(build(tiny_config("gemma2")))


def test_dropout_is_switched_off():
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=HEADS,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        attn_pdrop=0.5,
    )
    input_ids = ragged_prompts()[0]
    model = build(config).train()
    assert not torch.equal(model(input_ids).logits, model(input_ids).logits)
    prepare_backbone(model)
    assert torch.equal(model(input_ids).logits, model(input_ids).logits)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_is_left_as_it_was(is_training: bool):
    assert prepare_backbone(build(tiny_config("llama")).train(is_training)).training is is_training
    refused = build(DiffLlamaConfig(**SIZE)).train(is_training)
    with pytest.raises(ValueError, match="cannot be replayed"):
        prepare_backbone(refused)
    assert refused.training is is_training


def test_weights_that_overflow_are_named_as_such():
    broken = copy.deepcopy(tiny_model("llama"))
    broken.get_output_embeddings().weight.data.fill_(torch.inf)
    with pytest.raises(ValueError, match="logits that are not finite"):
        prepare_backbone(broken)


def test_the_proof_computes_in_float32_whatever_the_process_has_chosen():
    model, seen = build(tiny_config("llama")), []
    hook = model.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        prepare_backbone(model)
        assert set(seen) == {"highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
        hook.remove()
