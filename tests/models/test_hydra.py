"""Roles use the right weights, also after nesting, errors and recomputation."""

import copy
import re
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_rlkv.models import replay_logps
from lit_rlkv.models.activations import checkpoint_layers, checkpointed_layers
from lit_rlkv.models.adapters import (
    LoraSpec,
    active_adapter,
    add_adapter,
    lora_layers,
    use_adapter,
    use_states,
)
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.types import Rollout
from tests.models_zoo import tiny_model
from tests.rollouts import roll_out

LORA = LoraSpec(rank=4, alpha=8, target_modules="all-linear")
ALL = ("policy", "reference", "reward", "value")


def head_for(model) -> dict[str, Tensor]:
    size = model.config.hidden_size
    return {"linear.weight": torch.linspace(-1, 1, size)[None], "linear.bias": torch.tensor([0.5])}


def make(layout: str = "hydra", needed=ALL, lora: LoraSpec = LORA, **options) -> Roles:
    torch.manual_seed(0)  # of the adapters' first matrices
    head = head_for(tiny_model())
    options = {"reward_head": head, "value_head": head} | options
    return Roles(layout, lambda role: copy.deepcopy(tiny_model()), lora=lora, needed=needed, **options)


def moved(roles: Roles) -> Roles:
    """Move every adapter away from zero, each in another direction."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in roles.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=generator)
    return roles


@cache
def shared() -> Roles:
    return moved(make())


@cache
def rollout() -> Rollout:
    return roll_out(max_new_tokens=8)


def logps_as(role: str, roles: Roles | None = None, *, shadow: bool = True) -> Tensor:
    with torch.no_grad(), acting_as(roles or shared(), role) as backbone:
        return replay_logps(backbone, rollout(), shadow=shadow)


def base_logps(*, shadow: bool = True) -> Tensor:
    with torch.no_grad():
        return replay_logps(tiny_model(), rollout(), shadow=shadow)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("role", ALL)
def test_at_first_every_role_is_bitwise_the_base_model(layout: str, role: str):
    assert torch.equal(logps_as(role, make(layout)), base_logps())


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("role", ["reference", "reward"])
def test_roles_without_adapter_stay_bitwise_the_base_model(layout: str, role: str):
    assert torch.equal(logps_as(role, moved(make(layout))), base_logps())


def test_policy_reference_and_critic_differ():
    policy, reference, value = (logps_as(role) for role in ("policy", "reference", "value"))
    for first, second in ((policy, reference), (policy, value), (value, reference)):
        assert (first - second).abs().max() > 0.1


def test_in_the_joint_layout_policy_and_critic_are_one():
    joint = moved(make("j_hydra"))
    assert torch.equal(logps_as("policy", joint), logps_as("value", joint))
    assert (logps_as("policy", joint) - logps_as("reference", joint)).abs().max() > 0.1


def test_outside_of_a_role_all_adapters_are_off():
    backbone = shared().backbone("policy")
    with torch.no_grad():
        assert torch.equal(replay_logps(backbone, rollout()), base_logps())


def test_roles_nest():
    expected = {role: logps_as(role) for role in ALL}
    with torch.no_grad(), acting_as(shared(), "value") as backbone:
        with acting_as(shared(), "reference"):
            with acting_as(shared(), "policy"):
                assert torch.equal(replay_logps(backbone, rollout()), expected["policy"])
            assert torch.equal(replay_logps(backbone, rollout()), expected["reference"])
        assert torch.equal(replay_logps(backbone, rollout()), expected["value"])


def test_the_role_before_is_restored_after_an_error():
    backbone = shared().backbone("policy")
    with acting_as(shared(), "policy"):
        with pytest.raises(RuntimeError, match="in the middle"), acting_as(shared(), "reference"):
            raise RuntimeError("in the middle")
        assert active_adapter(lora_layers(backbone)) == "policy"
    assert active_adapter(lora_layers(backbone)) is None


def test_no_role_changes_what_trains():
    roles = make()
    trainable = {name for name, p in roles.named_parameters() if p.requires_grad}
    assert {name for name in trainable if "lora_" not in name} == {
        "heads.value.linear.weight",
        "heads.value.linear.bias",
    }
    assert {name.split(".")[-2] for name in trainable if "lora_" in name} == {"policy", "value"}
    for role in ALL:
        with acting_as(roles, role):
            assert {name for name, p in roles.named_parameters() if p.requires_grad} == trainable


@pytest.mark.parametrize("role", ["policy", "value"])
def test_gradients_reach_the_adapter_of_the_active_role_only(role: str):
    roles = moved(make())
    with acting_as(roles, role) as backbone:
        replay_logps(backbone, rollout()).sum().backward()
    touched = {name for name, p in roles.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert {name.split(".")[-2] for name in touched} == {role}
    mine = {name for name, _ in roles.named_parameters() if "lora_" in name and f".{role}." in name}
    assert touched == mine


def test_the_reference_has_no_gradient():
    with acting_as(shared(), "reference") as backbone:
        assert not replay_logps(backbone, rollout()).requires_grad


def gradients_after_a_switch(roles: Roles, *, shadow: bool = True) -> dict[str, Tensor]:
    """The policy's gradients where its backward pass runs after three other forwards in other roles."""
    roles.zero_grad()
    with acting_as(roles, "policy") as backbone:
        loss = replay_logps(backbone, rollout(), shadow=shadow).sum()
    for role, other_view in (("reference", True), ("value", False), ("policy", not shadow)):
        with torch.no_grad(), acting_as(roles, role) as backbone:
            replay_logps(backbone, rollout(), shadow=other_view)
    with acting_as(roles, "value"):
        loss.backward()
    return {name: p.grad.clone() for name, p in roles.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("layout", ["hydra", "j_hydra", "dynamic_lora", "ppo"])
def test_a_layer_recomputed_after_a_switch_uses_its_own_role_and_mask(layout: str, shadow: bool):
    plain = gradients_after_a_switch(moved(make(layout)), shadow=shadow)
    again = gradients_after_a_switch(moved(make(layout, checkpoints_layers=True)), shadow=shadow)
    assert plain.keys() == again.keys()
    assert max(float(g.abs().max()) for g in plain.values()) > 0.1
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-5)


def test_without_the_binding_a_recomputed_layer_would_take_the_other_role():
    """The control of the test above: checkpointing that remembers no role, with our refusal left out."""
    roles = moved(make(checkpoints_layers=True))
    for layer in checkpointed_layers(roles.backbone("policy")):
        layer._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, determinism_check="none"
        )
    plain, again = gradients_after_a_switch(moved(make())), gradients_after_a_switch(roles)
    worst = max(float((again.get(name, torch.zeros(())) - g).abs().max()) for name, g in plain.items())
    assert worst > 0.1


def test_a_layer_is_recomputed_with_all_adapters_that_were_active():
    model = copy.deepcopy(tiny_model()).train()
    for name in ("first", "second"):
        add_adapter(model, name, LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    trained = [value for name, value in model.named_parameters() if "lora_" in name]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.1)
    layers = lora_layers(model)

    def gradients() -> tuple[Tensor, ...]:
        with use_states(layers, [(False, ["first", "second"])] * len(layers)):
            loss = model(torch.arange(12).view(2, 6) % 7 + 3).logits.square().mean()
        with use_adapter(layers, "first"):
            return torch.autograd.grad(loss, trained)

    plain = gradients()
    checkpoint_layers(model)
    assert all(map(torch.equal, gradients(), plain))
    assert min(float(gradient.abs().max()) for gradient in plain) > 0


def test_checkpointing_really_recomputes_while_learning_and_never_while_sampling():
    roles = make(checkpoints_layers=True)
    roles.train()  # as lightning.Trainer does
    calls = []
    layer = checkpointed_layers(roles.backbone("policy"))[0]
    layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    with acting_as(roles, "policy") as backbone:
        replay_logps(backbone, rollout()).sum().backward()
    assert len(calls) == 2
    with torch.no_grad(), acting_as(roles, "policy") as backbone:
        found = roll_out(backbone, max_new_tokens=8)
    assert torch.equal(found.input_ids, rollout().input_ids)


def test_checkpointing_that_forgets_the_role_is_refused():
    roles = make()
    for layer in checkpointed_layers(roles.backbone("policy")):
        layer.gradient_checkpointing = True
    with (
        pytest.raises(ValueError, match=r"use roles\.gradient_checkpointing=true"),
        acting_as(roles, "policy"),
    ):
        pass


def test_bfloat16_autocast_leaves_the_reference_the_base_model():
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logps_as("reference"), base_logps())
        assert (logps_as("policy") - logps_as("reference")).abs().max() > 0.1


def test_only_the_backbones_that_are_needed_are_loaded():
    loaded = []

    def load(role: str):
        loaded.append(role)
        return copy.deepcopy(tiny_model())

    roles = Roles("ppo", load, lora=LORA, needed=("policy", "reference"))
    assert loaded == ["policy", "reference"]
    with pytest.raises(ValueError, match="role 'value' was not built; choose one of policy, reference"):
        roles.backbone("value")


def test_the_value_head_starts_as_a_copy_of_the_reward_head():
    roles = make()
    reward, value = roles.head("reward").linear.weight, roles.head("value").linear.weight
    assert torch.equal(reward, value)
    assert (reward.requires_grad, value.requires_grad) == (False, True)
    assert reward.data_ptr() != value.data_ptr()
    assert make(value_head=None).head("value").linear.weight.abs().max() == 0


def test_adapters_stand_where_they_were_asked_for():
    roles = make(lora=LoraSpec(rank=4, alpha=8, target_modules=["q_proj", "o_proj"]))
    adapted = {
        name.split(".lora_")[0].split(".")[-1] for name, _ in roles.named_parameters() if "lora_" in name
    }
    assert adapted == {"q_proj", "o_proj"}


def test_both_adapters_of_a_backbone_stand_in_the_same_places():
    names = [name for name, _ in make().named_parameters() if "lora_A" in name]
    places = {
        adapter: {n.replace(adapter, "*") for n in names if f".{adapter}." in n}
        for adapter in ("policy", "value")
    }
    assert places["policy"] == places["value"] != set()


def keys_of(roles: Roles, role: str) -> list[Tensor]:
    """Return the output of each layer's k_proj in a role."""
    found: list[Tensor] = []
    with torch.no_grad(), acting_as(roles, role) as backbone:
        hooks = [
            layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: found.append(output))
            for layer in backbone.base_model.layers
        ]
        replay_logps(backbone, rollout())
    for hook in hooks:
        hook.remove()
    return found


def test_without_adapters_on_keys_policy_and_reference_share_those_of_the_first_layer_only():
    """Prompts cannot share their KV between roles, because deeper keys depend on the adapter."""
    roles = moved(make(lora=LoraSpec(rank=4, alpha=8, target_modules=["q_proj", "o_proj"])))
    policy, reference = keys_of(roles, "policy"), keys_of(roles, "reference")
    assert torch.equal(policy[0], reference[0])
    assert (policy[1] - reference[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"layout": "hydro"}, "layout 'hydro' is unknown; choose one of ppo, lora_ppo"),
        ({"lora": LoraSpec(4, 8, ["nowhere"])}, "nowhere"),
        ({"lora": LoraSpec(4, 8, ["lm_head"])}, "must not include the shared output head"),
        ({"reward_head": None}, "the reward role needs a trained reward head"),
        ({"role": "critic"}, "unknown role 'critic'; choose one of policy, reference, reward, value"),
    ],
)
def test_impossible_roles_are_refused(arguments, says):
    arguments = dict(arguments)
    role = arguments.pop("role", "policy")
    with pytest.raises(ValueError, match=re.escape(says)), acting_as(make(**arguments), role):
        pass


@pytest.mark.parametrize(
    ("layout", "n_backbones"),
    [("ppo", 4), ("lora_ppo", 4), ("dynamic_lora", 2), ("j_hydra", 1), ("hydra", 1)],
)
def test_a_layout_holds_its_number_of_backbones_and_no_copy(layout: str, n_backbones: int):
    roles = make(layout)
    one = sum({p.data_ptr(): p.numel() for p in tiny_model().parameters()}.values())
    extras = [p for n, p in roles.named_parameters() if "lora_" in n or n.startswith("heads.")]
    storages = {p.untyped_storage().data_ptr(): p.numel() for p in roles.parameters()}
    assert sum(storages.values()) - sum(p.numel() for p in extras) == n_backbones * one
