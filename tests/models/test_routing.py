"""Expert routing: recorded by the sampler, taken by the learner, compared with own hooks and formulas."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError
from transformers import AutoModelForCausalLM, PhimoeConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from lit_rlkv import prepare_backbone, replay_logps
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.models import activations, preparation
from lit_rlkv.models.adapters import LoraSpec
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.routing import expert_dtype, routers_of
from lit_rlkv.types import Rollout
from tests.explicit_routing import own_choice, perturb
from tests.hand_built import LORA, TRAINED_HEAD, shift
from tests.models_zoo import MOE_FAMILIES, SIZE, build, tiny_config, tiny_model
from tests.rollouts import gap, roll_out


def sample(model: PreTrainedModel, cache: str = "snapkv", **options) -> Rollout:
    options = {"num_return_sequences": 2, "record_routing": True, "max_new_tokens": 12} | options
    return roll_out(model, cache, **options)


@cache
def rolled_out(family: str) -> Rollout:
    return sample(tiny_model(family))


def updated(family: str) -> PreTrainedModel:
    """The model of `rolled_out` after an update that makes other experts the best ones."""
    model = prepare_backbone(build(tiny_config(family)))
    perturb(model)
    return model


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_record_is_what_transformers_chooses_for_each_token(family: str):
    rollout = sample(tiny_model(family), "dense")
    assert rollout.record.expert_ids is not None
    model = build(tiny_config(family))  # with its own attention, and no padding
    for row, is_token in enumerate(rollout.attention_mask):
        with torch.no_grad(), own_choice(model) as chosen:
            model(rollout.input_ids[row : row + 1, is_token], use_cache=False)
        found = rollout.record.expert_ids[row][..., is_token][..., :-1].sort(dim=1).values
        expected = torch.stack(chosen)[..., :-1].sort(dim=1).values
        assert torch.equal(found.long(), expected)


def test_nothing_is_recorded_unless_it_is_asked_for():
    model = tiny_model("mixtral")
    plain, rollout = sample(model, record_routing=False), rolled_out("mixtral")
    assert plain.record.expert_ids is None
    assert torch.equal(plain.rollout_logps, rollout.rollout_logps)
    assert all("forward" not in vars(module) for module in model.modules())


ATTENTION_LORA = replace(LORA, target_modules=["q_proj", "v_proj"])


def roles_of(
    family: str = "mixtral",
    layout: str = "hydra",
    lora: LoraSpec = ATTENTION_LORA,
    *,
    checkpoints_layers=False,
) -> Roles:
    torch.manual_seed(0)
    return shift(
        Roles(
            layout,
            lambda role: updated(family),
            lora=lora,
            needed=("reference", "reward", "value"),
            reward_head=TRAINED_HEAD,
            checkpoints_layers=checkpoints_layers,
        )
    )


def policy_gradients(roles: Roles, rollout: Rollout) -> dict[str, Tensor]:
    weight = torch.randn(rollout.input_ids.shape, generator=torch.Generator().manual_seed(1))
    with acting_as(roles, "policy") as acting:
        loss = (replay_logps(acting, rollout) * weight).sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in roles.named_parameters() if p.grad is not None}
    roles.zero_grad()
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [("mixtral", "j_hydra"), ("deepseek_v3", "ppo")],  # adapters on routers and experts, or no adapters
)
def test_recomputed_layers_take_the_experts_of_their_forward(family, layout, monkeypatch):
    rollout = rolled_out(family)
    stored = policy_gradients(roles_of(family, layout, LORA), rollout)
    assert any("gate" in name for name in stored)
    roles = roles_of(family, layout, LORA, checkpoints_layers=True)

    def error() -> float:
        found = policy_gradients(roles, rollout)
        assert found.keys() == stored.keys()
        errors = [(found[name] - g).abs().max() / g.abs().max().clamp(min=1e-2) for name, g in stored.items()]
        return float(max(errors))

    assert error() < 1e-4
    given = activations.given_experts
    monkeypatch.setattr(activations, "given_experts", lambda model: given(model).roll(1, dims=1))
    assert error() > 1e-2
    monkeypatch.setattr(activations, "given_experts", lambda model: None)
    with pytest.raises(CheckpointError):
        error()


def test_reference_and_critic_take_the_experts_and_the_reward_does_not():
    roles, rollout = roles_of(), rolled_out("mixtral")
    roles.head("value").linear.weight.data.normal_()
    unrecorded = rollout.with_record(expert_ids=None)
    views = {"policy": True, "reference": True, "value": True, "reward": True}
    score = partial(score_rollout, roles, views=views, temperature=1.0)
    found, plain = score(rollout=rollout), score(rollout=unrecorded)
    for role in ("policy", "reference"):
        with torch.no_grad(), acting_as(roles, role) as acting:
            expected = replay_logps(acting, rollout)
        assert float((found[role] - expected).abs().max()) < 1e-5, role
        assert float((found[role] - plain[role]).abs().max()) > 1e-2, role
    assert float((found["value"] - plain["value"]).abs().max()) > 1e-2
    assert float((found["reward"] - plain["reward"]).abs().max()) < 1e-5


def test_ids_take_one_byte_up_to_128_experts_and_two_beyond():
    settings = {"num_key_value_heads": 2, "num_hidden_layers": 1, "num_experts_per_tok": 3}
    for n_experts, dtype in ((128, torch.int8), (129, torch.int16)):
        config = tiny_config("mixtral", **settings | {"num_local_experts": n_experts})
        model = prepare_backbone(build(config))
        rollout = sample(model)
        assert rollout.record.expert_ids is not None
        assert rollout.record.expert_ids.dtype == expert_dtype(routers_of(model)) == dtype
        assert rollout.record.expert_ids.shape[1:3] == (1, 3)
        assert gap(model, rollout) < 1e-4


def test_models_without_a_top_k_router_are_refused_with_the_reason():
    sparse_mixer = PhimoeConfig(**SIZE, num_local_experts=4)
    for model in (tiny_model("llama"), build(sparse_mixer)):
        with pytest.raises(
            ValueError, match="no routing to replay: no module chooses experts by a top-k"
        ) as e:
            routers_of(model)
        assert "\n" not in str(e.value)


class TwiceRouter(MixtralTopKRouter):
    def forward(self, hidden_states):
        super().forward(hidden_states)
        return super().forward(hidden_states)


class DeafRouter(MixtralTopKRouter):
    """Notes the largest by a top-k, and chooses by sorting."""

    def forward(self, hidden_states):
        logits, *_ = super().forward(hidden_states)
        best = logits.softmax(-1).sort(descending=True)
        return logits, best.values[:, :2], best.indices[:, :2]


@pytest.mark.parametrize(
    ("router", "says"),
    [
        (TwiceRouter, "its TwiceRouter chooses 2 times in a forward"),
        (DeafRouter, "it does not compute the same with the experts that it chose, and something else with"),
    ],
)
def test_a_choice_that_cannot_be_replaced_is_refused(router, says):
    model = build(tiny_config("mixtral"))
    for module in model.modules():
        if type(module) is MixtralTopKRouter:
            module.__class__ = router
    with pytest.raises(ValueError, match=says):
        routers_of(prepare_backbone(model))


def test_experts_of_another_architecture_are_refused():
    rollout = rolled_out("mixtral")
    with pytest.raises(ValueError, match=r"must be for the 2 routers of DeepseekV3ForCausalLM, got 3 layers"):
        replay_logps(tiny_model("deepseek_v3"), rollout)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no routing to replay"):
        replay_logps(tiny_model(), rollout)


def in_bfloat16(seed: int) -> PreTrainedModel:
    """A mixture of many experts that are nearly tied."""
    config = tiny_config("deepseek_v3", num_hidden_layers=6, n_routed_experts=64, num_experts_per_tok=8)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
        if name.endswith("gate.weight"):  # the experts of the second half score almost as those of the first
            parameter.data[32:] = parameter.data[:32] * (1 + 2**-9 * torch.randn(32, 1))
    return model.bfloat16().eval()


def test_a_model_in_bfloat16_is_not_refused_because_its_experts_flip_by_rounding(monkeypatch):
    seeds = range(12)
    for seed in seeds:
        prepare_backbone(in_bfloat16(seed))

    def no_routers(model: PreTrainedModel) -> list:
        raise ValueError

    monkeypatch.setattr(preparation, "routers_of", no_routers)  # each forward of the check then chooses anew
    refused = 0
    for seed in seeds:
        try:
            prepare_backbone(in_bfloat16(seed))
        except ValueError as error:
            refused += "logits change" in str(error) or "information flows" in str(error)
    assert refused > 0
