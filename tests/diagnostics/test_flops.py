from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AriaTextConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    Gemma3Config,
    Gemma4TextConfig,
    JetMoeConfig,
    MixtralConfig,
    PretrainedConfig,
)

from lit_rlkv.diagnostics.evictions import response_queries
from lit_rlkv.diagnostics.flops import flop_costs, learner_work, peak_flops, rollout_work
from lit_rlkv.kernels.shadow_attention.reference import visible
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter
from lit_rlkv.models.backbone import hidden_states
from lit_rlkv.types import NEVER, Record, Rollout
from tests.hand_built import make_datamodule, make_roles, replayed
from tests.models_zoo import FAMILIES, HEAD_DIM, HIDDEN, LAYERS, VOCAB, build, tiny_config, tiny_model

N = NEVER
LORA = LoraSpec(rank=2, alpha=4, target_modules="all-linear")
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * 64
"""Weights of a layer of the tiny Llama with half as many KV heads: q and o, k and v, gate and up and down."""
LAYER_INPUTS_AND_OUTPUTS = 4 * 2 * HIDDEN - 2 * HIDDEN // 2 + 3 * (HIDDEN + 64)


def test_a_token_costs_two_flops_a_weight_forward_and_four_more_backward():
    costs = flop_costs(build(tiny_config("llama")))
    assert costs is not None
    assert costs.forward_per_token == 2 * LAYERS * LAYER
    assert costs.backward_per_token == 4 * LAYERS * LAYER
    assert costs.forward_per_position == 2 * HIDDEN * VOCAB
    assert costs.backward_per_position == 4 * HIDDEN * VOCAB
    # A key that a KV head sees is multiplied with the queries of two heads, and so is its value.
    assert costs.forward_per_pair == 2 * (2 * HEAD_DIM + 2 * HEAD_DIM)


def lora_model():
    model = build(tiny_config("llama")).requires_grad_(False)
    add_adapter(model, "policy", LORA)
    add_adapter(model, "value", LORA)
    return model


def test_a_frozen_weight_needs_no_gradient_of_its_own():
    model = lora_model()
    with use_adapter(lora_layers(model), "policy"):
        costs = flop_costs(model)
    assert costs is not None
    adapter = LORA.rank * LAYER_INPUTS_AND_OUTPUTS
    assert costs.forward_per_token == 2 * LAYERS * (LAYER + adapter)
    assert costs.backward_per_token == 2 * LAYERS * (LAYER + adapter) + 2 * LAYERS * adapter
    assert costs.backward_per_position == costs.forward_per_position


def test_adapters_that_are_off_cost_nothing():
    costs = flop_costs(lora_model())
    assert costs is not None
    assert costs.forward_per_token == costs.backward_per_token == 2 * LAYERS * LAYER


# Of each way to name the experts that meet a token, and to hold their weights; Dbrx holds them in one matrix.
MIXTURES = [
    MixtralConfig(num_hidden_layers=1),
    AriaTextConfig(num_hidden_layers=1),
    DbrxConfig(n_layers=1, attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}),
    JetMoeConfig(num_hidden_layers=1),
    Gemma4TextConfig(
        num_hidden_layers=1, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64
    ),
]


@pytest.mark.parametrize("config", MIXTURES, ids=lambda config: config.model_type)
def test_the_flops_of_a_mixture_of_experts_are_not_known(config: PretrainedConfig):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert flop_costs(model) is None


def test_what_reads_images_costs_a_token_nothing():
    tower = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    text = tiny_config("gemma3")
    config = Gemma3Config(text_config=text.to_dict(), vision_config=tower, mm_tokens_per_image=4)
    assert flop_costs(build(config)) == flop_costs(build(text)) is not None


def test_weights_of_4_bits_count_as_what_they_stand_for():
    model = build(tiny_config("llama")).requires_grad_(False)
    before = flop_costs(model)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                packed = torch.zeros(module.weight.numel() // 2, 1, dtype=torch.uint8)
                state = SimpleNamespace(shape=module.weight.shape)
                module.weight = nn.Parameter(packed, requires_grad=False)
                module.weight.quant_state = state  # as bitsandbytes has it, which needs a GPU
    assert flop_costs(model) == before is not None


def products(run) -> int:
    """Flops of all matrix products with weights in what is run, counted one by one."""
    with FlopCounterMode(display=False) as counter:
        run()
    found = counter.get_flop_counts()["Global"]
    return sum(n for op, n in found.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_full_training_are_those_that_torch_counts(family: str):
    model, input_ids = tiny_model(family), torch.arange(24).view(2, 12) % VOCAB
    record = Record(torch.full((2, 1, 1, 12), N, dtype=torch.int32))
    positions = torch.arange(12).expand(2, -1)
    costs = flop_costs(model)
    assert costs is not None
    forward = partial(hidden_states, model, input_ids, positions, record=record)
    with torch.no_grad():
        assert products(forward) == 24 * costs.forward_per_token
    both = products(lambda: forward().sum().backward())
    model.zero_grad(set_to_none=True)
    assert both == 24 * (costs.forward_per_token + costs.backward_per_token)


def test_products_of_lora_are_those_that_torch_counts_but_for_the_states_of_the_first_layer():
    model, input_ids = lora_model(), torch.arange(24).view(2, 12) % VOCAB
    model = prepare_backbone(model)
    record = Record(torch.full((2, 1, 1, 12), N, dtype=torch.int32))
    positions = torch.arange(12).expand(2, -1)
    with use_adapter(lora_layers(model), "policy"):
        costs = flop_costs(model)
        assert costs is not None
        counted = products(lambda: hidden_states(model, input_ids, positions, record=record).sum().backward())
    # The embeddings are frozen, so nobody asks q, k and v of the first layer for the gradient of their input.
    unneeded = 2 * (2 * HIDDEN * HIDDEN + 3 * LORA.rank * HIDDEN)
    assert counted == 24 * (costs.forward_per_token + costs.backward_per_token - unneeded)


def test_pairs_of_the_learner_are_what_the_table_lets_it_see():
    # Row 0: padding, then tokens 1 to 3 that see 1, 2, 3 keys. Row 1 ends at column 2; key 0 dies at 2.
    evicted_at = torch.tensor([[[[0, N, N, N]]], [[[2, N, N, 0]]]], dtype=torch.int32)
    work = learner_work(evicted_at, n_layers=3, n_kv_heads=2)
    assert int(work.n_tokens) == 3 + 3
    assert int(work.n_pairs) == 3 * 2 * ((1 + 2 + 3) + (1 + 2 + 2))
    full = evicted_at.expand(2, 3, 2, 4)
    assert int(learner_work(full, n_layers=3, n_kv_heads=2).n_pairs) == int(work.n_pairs)


def two_responses() -> Rollout:
    """Two responses to one prompt of 2 tokens, behind a column of padding: of 3 actions and of 1."""
    attention_mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]).bool()
    response_mask = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 0, 0]]).bool()
    evicted_at = torch.tensor([[[[0, 3, 4, N, N, N]]], [[[0, N, N, N, 0, 0]]]], dtype=torch.int32)
    return Rollout(
        torch.zeros(2, 6).long(), attention_mask, response_mask, torch.zeros(2, 6), Record(evicted_at), 0
    )


def test_the_sampler_reads_a_prompt_once_and_a_response_without_its_last_token():
    work, n_positions = rollout_work(two_responses(), group_size=2)
    assert int(work.n_tokens) == 2 + 2
    # The prompt: 1 + 2. Column 3 sees its own key and that of 2; column 4 those of 3 and 4.
    assert int(work.n_pairs) == 3 + 2 + 2
    assert n_positions == 1 + 2
    alone, n_positions = rollout_work(two_responses(), group_size=1)
    assert int(alone.n_tokens) == 2 * 2 + 2
    assert n_positions == 2 + 2


def test_tokens_given_between_turns_are_read_and_have_no_logits():
    rollout = two_responses()
    turns = torch.tensor([[0, 0, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0]]).bool()
    work, n_positions = rollout_work(replace(rollout, response_mask=turns), group_size=2)
    assert (int(work.n_tokens), int(work.n_pairs)) == (2 + 2, 3 + 2 + 2)
    assert n_positions == 1 + 1


def test_pairs_of_a_rollout_are_counted_as_they_are_defined():
    rollout = make_datamodule(make_roles(), rollout={"n_prompts": 6}, group_size=1).collect().rollout
    seen, dense = (replayed(rollout, shadow=shadow).evicted_at for shadow in (True, False))
    is_seen = visible(seen)
    assert int(learner_work(seen, 2, 2).n_pairs) == int(is_seen.sum())
    # The sampler asked with every token but the last of each row, and read prompts before it evicted.
    is_asked = rollout.attention_mask & response_queries(rollout.attention_mask)
    of_sampler = is_seen.sum(dim=(1, 2, 4))[is_asked].sum()
    work, _ = rollout_work(rollout, group_size=1)
    assert int(work.n_pairs) == int(of_sampler)
    assert int(work.n_tokens) == int(is_asked.sum())
    assert not torch.equal(of_sampler, visible(dense).sum() * 4)


CUDA = torch.device("cuda", 0)


@pytest.fixture
def named(monkeypatch):
    def name_it(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr("lightning.fabric.accelerators.cuda._is_ampere_or_later", lambda *_: True)

    before = torch.get_float32_matmul_precision()
    yield name_it
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_products_of_bfloat16_are_counted_without_sparsity(named, name, tflops):
    named(name)
    assert peak_flops(CUDA, torch.bfloat16) == pytest.approx(tflops * 1e12)


def test_float32_is_that_of_tensor_cores_where_they_may_be_used(named):
    named("NVIDIA H200")
    torch.set_float32_matmul_precision("highest")
    assert peak_flops(CUDA, torch.float32) == pytest.approx(66.9e12)
    torch.set_float32_matmul_precision("high")
    assert peak_flops(CUDA, torch.float32) == pytest.approx(494.7e12)


def test_a_device_that_nobody_knows_has_no_peak(named):
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    named("NVIDIA of tomorrow")
    with pytest.warns(UserWarning, match="not found"):
        assert peak_flops(CUDA, torch.bfloat16) is None
