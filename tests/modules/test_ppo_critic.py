"""PPO's critic: warmup and its own learning rate."""

import math

import pytest
import torch

from lit_rlkv.models.layouts import LAYOUTS, ROLES
from lit_rlkv.modules.ppo import PPO
from tests.hand_built import make_ppo, make_roles, train_here
from tests.modules.ppo_by_definition import make_data


@pytest.mark.parametrize("layout", ["hydra", "j_hydra", "lora_ppo", "ppo"])
def test_the_critic_alone_learns_while_it_warms_up(layout: str):
    roles = make_roles(layout, ROLES)
    module = make_ppo(roles)
    parts = {"learner_parts": module.learner_parts, "warmup_part": module.warmup_part}
    data = make_data(roles, n_minibatches=2, critic_warmup=2, **parts)
    parameters = {role: roles.trained_parameters(role) for role in ("policy", "value")}

    def moved_in(n_iterations: int) -> dict[str, bool]:
        before = {role: [p.detach().clone() for p in mine] for role, mine in parameters.items()}
        log = train_here(module, data, n_iterations)
        assert log.n_steps == 2 * n_iterations
        assert ("policy_loss" in log.rows[-1]) == (data.iteration > 2)
        return {
            role: not all(torch.equal(p, old) for p, old in zip(mine, before[role], strict=True))
            for role, mine in parameters.items()
        }

    assert moved_in(2) == {"policy": False, "value": True}
    assert moved_in(1) == {"policy": True, "value": True}


def test_a_critic_that_would_never_learn_is_refused():
    module = make_ppo(make_roles("hydra", ROLES))
    (batch,) = make_data(module.roles, learner_parts=(("policy",),)).train_dataloader()
    with pytest.raises(ValueError, match=r"give the data module learner_parts=module"):
        module.training_step(batch, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_optimizer_has_every_parameter_once_and_the_critic_a_rate_of_its_own(layout: str):
    module = make_ppo(make_roles(layout, ROLES), value_lr_scale=3.0)
    policy, critic = module.configure_optimizers()["optimizer"].param_groups
    assert (policy["lr"], critic["lr"]) == pytest.approx((1e-2, 3e-2))
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    listed = [names[id(p)] for p in (*policy["params"], *critic["params"])]
    assert sorted(listed) == sorted(names.values())
    only_critic = {names[id(p)].split(".")[1] for p in critic["params"]}
    assert only_critic == ({"heads"} if layout == "j_hydra" else {"heads", "backbones"})


def test_both_learning_rates_rise_and_fall_together():
    module = make_ppo(make_roles("hydra", ROLES), value_lr_scale=3.0, n_warmup_steps=3, n_decay_steps=8)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    # a quarter more at each of four steps, and an eighth less at each of eight
    for fraction in (1 / 4, 2 / 4 * 7 / 8, 3 / 4 * 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0, 0.0):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([1e-2 * fraction, 3e-2 * fraction])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    "name", ["clip_low", "clip_high", "value_clip", "value_weight", "value_lr_scale", "target_kl"]
)
def test_bounds_that_leave_nothing_to_learn_are_refused(name: str):
    options = {"clip_low": 0.2, "clip_high": 0.2, "value_clip": None, "target_kl": None}
    PPO.check_options(**options)
    for value in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=f"{name} must be a number above 0, got {value}"):
            PPO.check_options(**(options | {name: value}))


@pytest.mark.parametrize("name", ["clip_low", "clip_high", "value_weight", "value_lr_scale"])
def test_only_optional_arguments_may_be_none(name: str):
    with pytest.raises(ValueError, match=f"{name} must be a number above 0, got None"):
        PPO.check_options(**{name: None})
