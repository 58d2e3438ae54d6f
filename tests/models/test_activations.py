"""Tests of activations: layer inputs on the device or in host memory, and MLPs in tiles."""

import copy
import weakref
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, Gemma4TextConfig, PhiConfig

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import activations, prepare_backbone, replay_logps
from lit_rlkv.models.activations import checkpoint_layers, checkpointed_layers, checkpointing
from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter
from lit_rlkv.rollout import generate
from lit_rlkv.types import Rollout
from tests.models.test_hybrids import hybrid
from tests.models_zoo import PAD, SIZE, build, ragged_prompts, tiny_model
from tests.tiers import short_tier

CACHE = CacheSpec("snapkv", budget=8, interval=3, sink=1, window=3)
OTHERS = {
    "qwen3_next": lambda: hybrid("qwen3_next"),
    "cohere": lambda: build(CohereConfig(**SIZE)),  # one norm before attention and MLP
    "phi": lambda: build(PhiConfig(**SIZE)),
    "gemma4": lambda: build(  # a norm of the experts maps the tokens of all rows
        Gemma4TextConfig(
            **SIZE, head_dim=8, global_head_dim=8, enable_moe_block=True, num_experts=4, top_k_experts=2,
            moe_intermediate_size=16, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        )
    ),
}  # fmt: skip
"""Models that are not in the zoo."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "TILE", 5)


@cache
def base(family: str) -> nn.Module:
    return prepare_backbone(OTHERS[family]()) if family in OTHERS else tiny_model(family)


def learner(family: str, *, trains_all: bool) -> nn.Module:
    """A model with two adapters away from zero."""
    model = copy.deepcopy(base(family))
    torch.manual_seed(0)
    for name in ("first", "second"):
        add_adapter(model, name, LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
        elif trains_all:
            parameter.requires_grad_(True)
    return model


@cache
def sampled(family: str) -> Rollout:
    options = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": PAD}
    return generate(base(family), *ragged_prompts(), cache=CACHE, **options)


def gradients(model: nn.Module, *, is_on: bool = True) -> tuple[Tensor, ...]:
    """Log-probs of a rollout and their gradients, whose backward pass runs under the other adapter."""
    rollout = sampled(model.config.model_type.removesuffix("_text")).to(model.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layers = lora_layers(model)
    with use_adapter(layers, "first"), checkpointing(model, is_on):
        logps = replay_logps(model, rollout)
    with use_adapter(layers, "second"):
        found = torch.autograd.grad(logps.square().sum(), trained, allow_unused=True)
    return logps.detach(), *(torch.zeros(()) if each is None else each for each in found)


def tiled(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if activations.is_tiled(module)]


def error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    scale = max(float(each.abs().max()) for each in expected[1:])
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / scale


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("trains_all", [False, True])
@pytest.mark.parametrize(
    "family",
    short_tier(
        ["llama", "gpt2", "gemma2", "qwen3", "gemma3", "qwen3_moe", "deepseek_v3", *OTHERS],
        ["llama", "gemma2", *OTHERS],
    ),
)
def test_gradients_are_those_of_plain_layers(family: str, trains_all: bool, on_host: bool):
    model = learner(family, trains_all=trains_all)
    expected = gradients(model, is_on=False)
    checkpoint_layers(model, "host" if on_host else True)
    assert len(tiled(model)) >= 2 * len(checkpointed_layers(model))  # two norms at least
    assert error(gradients(model), expected) < 1e-5


def test_a_tile_that_forgets_the_adapter_of_its_forward_is_found(monkeypatch: pytest.MonkeyPatch):
    model = learner("llama", trains_all=False)
    expected = gradients(model, is_on=False)
    in_tiles = activations._in_tiles

    def forgetful(forward, layer, mlp, as_now, hidden):
        return in_tiles(forward, layer, mlp, nullcontext, hidden)

    monkeypatch.setattr(activations, "_in_tiles", forgetful)
    checkpoint_layers(model)
    assert error(gradients(model), expected) > 1e-2


def test_a_recomputed_layer_runs_its_mlp_twice_and_keeps_one_tile():
    model = learner("llama", trains_all=False)
    sizes: list[tuple[bool, int]] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, args, out: sizes.append((torch.is_grad_enabled(), args[0].shape[1]))
    )
    checkpoint_layers(model)
    gradients(model)
    first, again = ([size for keeps, size in sizes if keeps is is_kept] for is_kept in (False, True))
    assert first == again
    assert max(again) == activations.TILE
    assert len(again) > 3


def test_what_a_norm_gives_to_an_mlp_is_not_kept():
    model = learner("llama", trains_all=False)
    layer = model.model.layers[1]
    outs: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[bool] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if torch.is_grad_enabled() and out.shape[1] > activations.TILE:
            outs.append(weakref.ref(out.untyped_storage()))

    layer.post_attention_layernorm.register_forward_hook(note)

    def look(*unused: object) -> None:  # while a tile is computed for the backward pass
        if torch.is_grad_enabled():
            alive.append(outs[-1]() is not None)

    layer.mlp.up_proj.register_forward_hook(look)
    checkpoint_layers(model)
    gradients(model)
    assert alive
    assert not any(alive)


def test_inputs_of_layers_leave_their_device(monkeypatch: pytest.MonkeyPatch):
    model = learner("llama", trains_all=False)
    inputs: list[weakref.ref[torch.UntypedStorage]] = []

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not torch._C._current_graph_task_id() >= 0:
            inputs.append(weakref.ref(args[0].untyped_storage()))

    model.model.layers[1].register_forward_pre_hook(watch)
    alive = {}
    for on_host in (False, True):
        inputs.clear()
        checkpoint_layers(model, "host" if on_host else True)
        rollout = sampled("llama")
        with checkpointing(model, is_on=True), use_adapter(lora_layers(model), "first"):
            loss = replay_logps(model, rollout).sum()
        alive[on_host] = [storage() is not None for storage in inputs]
        loss.backward()
    assert alive == {False: [True], True: [False]}


def test_under_autocast_a_forward_without_tiles_still_has_gradients_of_its_own(monkeypatch):
    model, whole = learner("llama", trains_all=True), sampled("llama")
    monkeypatch.setattr(activations, "TILE", 30)  # more than the first row has, and less than all rows
    weight = model.model.layers[0].mlp.up_proj.base_layer.weight

    def gradient(is_on: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), checkpointing(model, is_on):
            losses = [replay_logps(model, rollout).sum() for rollout in (whole, whole.rows(slice(0, 1)))]
        return torch.autograd.grad(losses[0] + losses[1], weight)[0]

    expected = gradient(False)
    checkpoint_layers(model)
    assert (gradient(True) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("repeat", range(3))
def test_on_a_gpu_copies_of_inputs_arrive_before_they_are_read(repeat: int):
    model = learner("llama", trains_all=True).cuda()
    expected = gradients(model, is_on=False)
    checkpoint_layers(model, "host")
    for _ in range(3):  # pinned memory is used again
        assert error(gradients(model), expected) < 1e-5


def test_of_a_mixture_of_experts_norms_alone_are_cut_into_tiles():
    model = copy.deepcopy(tiny_model("qwen3_moe"))
    checkpoint_layers(model)
    assert tiled(model)
    assert all(type(module).__name__.endswith("Norm") for module in tiled(model))
