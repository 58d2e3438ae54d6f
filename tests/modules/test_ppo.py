"""PPO against its formulas, written out here as loops over tokens in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.data.credit import CriticCredit, Experience
from lit_rlkv.data.rollouts import RolloutDataModule
from lit_rlkv.data.settings import KLConfig
from lit_rlkv.models.hydra import LAYOUTS, ROLES, Roles, acting_as
from lit_rlkv.models.replay import action_hidden, replay_logps
from lit_rlkv.modules.ppo import PPO
from lit_rlkv.types import Rollout, TrainBatch
from tests.modules.test_grpo import weights_by_definition
from tests.training import (
    ARMS,
    counted_forwards,
    gradients_of,
    make_datamodule,
    make_ppo,
    make_roles,
    shift,
    train_here,
)

BOTH = (("policy", "value"),)
GAMMA, LAM = 0.9, 0.8
PAID = KLConfig(weight=0.3, place="reward", estimator="k1")
STD_FLOOR = 1e-4


def make_data(roles: Roles, arm: str = "shadow", **options) -> RolloutDataModule:
    options = {"credit": CriticCredit(GAMMA, LAM), "kl": PAID, "aggregation": "token"} | options
    return make_datamodule(roles, correction=ARMS[arm], **({"learner_parts": BOTH} | options))


def roll_out(
    layout: str = "hydra", arm: str = "shadow", **options
) -> tuple[Roles, RolloutDataModule, Experience]:
    """A rollout, and roles that have moved on since: ratios and values leave their clips."""
    roles = shift(make_roles(layout, ROLES))
    data = make_data(roles, arm, **options)
    experience = data.collect()
    for name, parameter in roles.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(2.0)
    return roles, data, experience


def seen_by(roles: Roles, role: str, rollout: Rollout, shadow: bool = True) -> Tensor:
    """Log-probs of a role, or the values of the critic, in float64."""
    with torch.no_grad(), acting_as(roles, role) as backbone:
        if role != "value":
            return replay_logps(backbone, rollout, shadow=shadow).double()
        values = roles.head(role)(action_hidden(backbone, rollout, shadow=shadow))
        return torch.zeros(rollout.token_ids.shape).masked_scatter(rollout.is_action, values).double()


def actions_of(rollout: Rollout) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in rollout.is_action]


def credit_by_definition(
    experience: Experience, is_counted: Tensor, kl_weight: float = PAID.weight, mistake: str = ""
) -> tuple[Tensor, Tensor]:
    """r_t = −β·k1 + 1[t = T]·R, δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}; whitened A, and A + V."""
    old, ref = experience.old_logps.double(), experience.ref_logps.double()
    values = experience.values.double()
    advantages, returns = torch.zeros_like(old), torch.zeros_like(old)
    for row, columns in enumerate(actions_of(experience.rollout)):
        after, next_value = 0.0, float(values[row, columns[-1]]) if mistake == "bootstrap" else 0.0
        for column in reversed(columns):
            reward = -kl_weight * float(old[row, column] - ref[row, column])
            if column == columns[-1] or mistake == "reward at every token":
                reward += float(experience.rewards.total[row])
            delta = reward + GAMMA * next_value - float(values[row, column])
            after = delta + GAMMA * LAM * after
            next_value = float(values[row, column])
            advantages[row, column], returns[row, column] = after, after + next_value
    counted = [float(a) for a in advantages[is_counted]]
    mean = sum(counted) / len(counted)
    std = math.sqrt(sum((a - mean) ** 2 for a in counted) / (len(counted) - 1))
    whitened = (advantages - mean) / (std + STD_FLOOR)
    if mistake == "whitened returns":
        returns = torch.where(experience.rollout.is_action, whitened + values, 0.0)
    return torch.where(is_counted, whitened, 0.0), returns


def losses_by_definition(
    roles: Roles, experience: Experience, arm: str = "shadow", value_shadow: bool = True, mistake: str = ""
) -> dict[str, float]:
    """−Σ w·min(ρA, clip(ρ)A) / n_counted and Σ 0.5·max((V − R)², (clip(V) − R)²) / n_actions."""
    rollout, old = experience.rollout, experience.old_logps.double()
    logps = seen_by(roles, "policy", rollout, ARMS[arm].replays)
    values = seen_by(roles, "value", rollout, value_shadow)
    rho = (old - rollout.sampler_logps.double()).exp()
    weight, is_counted = weights_by_definition(arm, rho, rollout.is_action)
    advantages, returns = credit_by_definition(experience, is_counted, mistake=mistake)
    policy_loss = value_loss = 0.0
    for row, columns in enumerate(actions_of(rollout)):
        for column in columns:
            a, ratio = float(advantages[row, column]), float((logps - old)[row, column].exp())
            gain = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
            gain = ratio * a if mistake == "unclipped ratio" else gain
            policy_loss -= float(weight[row, column]) * gain / int(is_counted.sum())
            v, v_old, r = (float(x[row, column]) for x in (values, experience.values, returns))
            v_clip = min(max(v, v_old - 0.2), v_old + 0.2)
            worse = min if mistake == "better of both values" else max
            value_loss += 0.5 * worse((v - r) ** 2, (v_clip - r) ** 2) / int(rollout.is_action.sum())
    log_ratio = (logps - old)[rollout.is_action].tolist()
    approx_kl = sum(math.exp(x) - 1 - x for x in log_ratio) / len(log_ratio)  # KL(π_old ‖ π) by k3
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "approx_kl": approx_kl}
    return losses | {"loss": policy_loss + 0.5 * value_loss}


def step(module: PPO, batch: TrainBatch) -> dict[str, float]:
    """Loss and metrics of a micro-batch."""
    return {name: float(value.detach()) for name, value in module.training_step(batch, 0).items()}


@pytest.mark.parametrize("arm", ARMS)
def test_advantages_returns_and_losses_equal_their_definition(arm: str):
    roles, data, experience = roll_out(arm=arm)
    (batch,) = data.steps.minibatches(experience)
    assert torch.equal(
        batch.rollout.token_ids.sort(dim=0).values, experience.rollout.token_ids.sort(dim=0).values
    )
    found = step(make_ppo(roles, replays=ARMS[arm].replays, value_shadow=True), batch)
    expected = losses_by_definition(roles, experience, arm)
    assert found["value/clip_ratio"] > 0.1
    assert found["clip_ratio/region_mean"] > 0.02
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    credit = data.credit.assign(experience)
    weights = weights_by_definition(
        arm, (experience.old_logps - experience.rollout.sampler_logps).exp(), experience.rollout.is_action
    )
    advantages, returns = credit_by_definition(experience, weights[1])
    torch.testing.assert_close(credit.advantages.double(), advantages, rtol=0, atol=4e-6)
    torch.testing.assert_close(credit.returns.double(), returns, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("bootstrap", "value_loss"),
        ("reward at every token", "policy_loss"),
        ("whitened returns", "value_loss"),
        ("unclipped ratio", "policy_loss"),
        ("better of both values", "value_loss"),
    ],
)
def test_the_comparison_catches(mistake: str, name: str):
    roles, data, experience = roll_out()
    (batch,) = data.steps.minibatches(experience)
    found = step(make_ppo(roles), batch)
    wrong = losses_by_definition(roles, experience, mistake=mistake)
    assert abs(found[name] - wrong[name]) > 1e-3


@pytest.mark.parametrize(
    ("estimator", "of_log_ratio"),
    [
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
    ],
)
def test_a_kl_in_the_loss_is_weighed_like_the_policy_loss(estimator, of_log_ratio):
    kl = KLConfig(weight=0.7, place="loss", estimator=estimator)
    roles, data, experience = roll_out(kl=kl)
    assert (experience.kl_penalty == 0).all()
    (batch,) = data.steps.minibatches(experience)
    found = step(make_ppo(roles, kl_estimator=estimator), batch)
    log_ratio = seen_by(roles, "policy", experience.rollout) - seen_by(roles, "reference", experience.rollout)
    each = [of_log_ratio(float(d)) for d in log_ratio[experience.rollout.is_action]]
    assert found["kl"] == pytest.approx(sum(each) / len(each), rel=1e-6)
    assert found["kl"] > 1e-2
    rest = found["policy_loss"] + 0.5 * found["value_loss"]
    assert found["loss"] == pytest.approx(rest + 0.7 * sum(each) / len(each), rel=1e-6)
    # no KL in the reward then: the returns are those of β = 0
    credit = data.credit.assign(experience)
    _, returns = credit_by_definition(experience, experience.rollout.is_action, kl_weight=0.0)
    torch.testing.assert_close(credit.returns.double(), returns, rtol=0, atol=1e-6)
    _, paid = credit_by_definition(experience, experience.rollout.is_action, kl_weight=0.7)
    assert (credit.returns - paid).abs().max() > 0.01


def worst_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    assert max(float(g.abs().max()) for g in first.values()) > 1e-2
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("arm", ["shadow", "sparse_rl"])
@pytest.mark.parametrize("layout", ["hydra", "j_hydra"])
def test_micro_batches_and_separate_passes_do_not_change_the_gradient(layout: str, arm: str):
    roles, data, experience = roll_out(layout, arm)
    whole = list(data.steps.minibatches(experience))
    module = make_ppo(roles, replays=ARMS[arm].replays, value_shadow=True)
    expected = gradients_of(module, whole)
    for parts in (BOTH, (("policy",), ("value",))):
        data.steps.update = replace(data.steps.update, n_micro_batches=3, learner_parts=parts)
        batches = list(data.steps.minibatches(experience))
        assert [batch.ends_step for batch in batches] == [False] * (3 * len(parts) - 1) + [True]
        assert worst_difference(gradients_of(module, batches), expected) < 1e-5
        losses = [step(module, batch)["loss"] for batch in batches]
        assert sum(losses) == pytest.approx(step(module, whole[0])["loss"], rel=1e-6)
    # the control: denominators of their own for every micro-batch
    alone = [replace(batch, n_actions=int(batch.rollout.is_action.sum())) for batch in batches]
    assert worst_difference(gradients_of(module, alone), expected) > 1e-3


@pytest.mark.parametrize(
    ("layout", "arm", "value_shadow", "n_forwards"),
    [
        ("j_hydra", "shadow", True, 1),
        ("j_hydra", "shadow", False, 2),
        ("j_hydra", "naive", False, 1),
        ("j_hydra", "naive", True, 2),
        ("hydra", "shadow", True, 2),
        ("lora_ppo", "shadow", True, 2),
    ],
)
def test_policy_and_critic_share_a_forward_where_it_is_the_same(layout, arm, value_shadow, n_forwards):
    roles, data, experience = roll_out(layout, arm, sampling={"value_shadow": value_shadow})
    module = make_ppo(roles, replays=ARMS[arm].replays, value_shadow=value_shadow)
    assert len(module.learner_parts) == n_forwards
    (batch,) = data.steps.minibatches(experience)
    with counted_forwards(roles) as forwards:
        found = step(module, batch)
    assert len(forwards) == n_forwards
    # shared or not, the values are those of the critic's own view
    expected = losses_by_definition(roles, experience, arm, value_shadow)
    assert found["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
    other = losses_by_definition(roles, experience, arm, not value_shadow)
    assert abs(other["value_loss"] - expected["value_loss"]) > 1e-3


def test_one_part_learns_at_a_time_unless_that_is_turned_off():
    roles = make_roles("hydra", ROLES)
    assert make_ppo(roles).learner_parts == (("policy",), ("value",))
    assert make_ppo(roles, separate_passes=False).learner_parts == BOTH


def trained_by(layout: str, *learners: str) -> set[str]:
    """Adapters, heads and backbones that a micro-batch of these learners gives a gradient."""
    roles, data, experience = roll_out(layout)
    (batch,) = data.steps.minibatches(experience)
    gradients = gradients_of(make_ppo(roles), [replace(batch, learners=learners, ends_step=False)])
    found = set()
    for name in (name for name, gradient in gradients.items() if gradient.abs().max() > 0):
        parts = name.split(".")
        found.add(parts[-2] if "lora_" in name else ".".join(parts[1:3]))
    return found


@pytest.mark.parametrize(
    ("layout", "by_policy", "by_critic"),
    [
        ("hydra", {"policy"}, {"value", "heads.value"}),
        ("dynamic_lora", {"policy"}, {"value", "heads.value"}),
        ("j_hydra", {"joint"}, {"joint", "heads.value"}),
        ("ppo", {"backbones.policy"}, {"backbones.value", "heads.value"}),
    ],
)
def test_gradients_reach_the_learner_alone(layout: str, by_policy: set[str], by_critic: set[str]):
    assert trained_by(layout, "policy") == by_policy
    assert trained_by(layout, "value") == by_critic
    assert trained_by(layout, "policy", "value") == by_policy | by_critic


def n_steps(target_kl: float | None, n_epochs: int = 3) -> int:
    """Optimizer steps in two iterations, with two minibatches an epoch."""
    roles = make_roles("hydra", ROLES)
    module = make_ppo(roles, target_kl=target_kl)
    options = {"n_epochs": n_epochs, "n_minibatches": 2, "n_micro_batches": 2}
    return train_here(module, make_data(roles, learner_parts=module.learner_parts, **options), 2).n_steps


def test_an_iteration_ends_early_once_the_policy_has_moved_too_far():
    # 3 epochs · 2 minibatches in each of 2 iterations
    assert n_steps(None) == 12
    assert n_steps(1e6) == 12
    # The first step of a rollout is at KL 0; the second finds more than 1e-6 and is the last.
    assert n_steps(1e-6) == 4
    # What the last step of a rollout finds does not end the next rollout.
    assert n_steps(1e-6, n_epochs=1) == 4


def test_responses_that_were_cut_count_nothing_in_the_policy_loss():
    roles, data, experience = roll_out()
    (plain,) = data.steps.minibatches(experience)
    data.steps.update = replace(data.steps.update, mask_truncated=True)
    (masked,) = data.steps.minibatches(experience)
    is_cut = ~((masked.rollout.token_ids == data.tokenizer.eos_token_id) & masked.rollout.is_action).any(
        dim=1
    )
    assert 0 < is_cut.sum() < len(is_cut)
    assert (masked.loss_weight[is_cut] == 0).all()
    assert (plain.loss_weight > 0).equal(plain.rollout.is_action)
    assert (masked.loss_weight > 0)[~is_cut].equal(masked.rollout.is_action[~is_cut])
    # the policy learns as if they were not there, the critic from all
    kept = replace(masked.rows(~is_cut), n_actions=int(masked.rollout.is_action[~is_cut].sum()))
    module = make_ppo(roles)
    ours, alone, all_ = (module.step_terms(batch)[0] for batch in (masked, kept, plain))
    torch.testing.assert_close(ours["policy_loss"], alone["policy_loss"])
    torch.testing.assert_close(ours["value_loss"], all_["value_loss"])
    assert (ours["policy_loss"] - all_["policy_loss"]).abs() > 1e-3
    assert (ours["value_loss"] - alone["value_loss"]).abs() > 1e-3


def steered(roles: Roles, target: float) -> RolloutDataModule:
    return make_data(roles, kl=replace(PAID, target=target, horizon=160.0))


def test_the_weight_of_the_kl_is_steered_to_its_target_and_comes_back_with_the_state():
    roles = shift(make_roles("hydra", ROLES))
    data = steered(roles, target=1e-3)
    first = data.collect()
    # 16 responses over a horizon of 160, error kept within 0.2: 0.3 · (1 + 0.2 · 0.1)
    assert first.kl_weight == 0.3
    assert data.kl_weight == pytest.approx(0.306)
    raised = next(iter(data.train_dataloader()))
    second = data.collect()
    assert second.kl_weight == pytest.approx(0.306 * 1.02)
    log_ratio = (second.old_logps - second.ref_logps).masked_fill(~second.rollout.is_action, 0.0)
    torch.testing.assert_close(second.kl_penalty, second.kl_weight * log_ratio)
    assert raised.kl_weight == 0.0  # of a term in the loss, which there is not

    restored = steered(roles, target=1e-3)
    restored.load_state_dict(data.state_dict())
    assert restored.kl_weight == data.kl_weight != steered(roles, target=1e-3).kl_weight

    lowered = steered(roles, target=1e3)
    lowered.collect()
    assert lowered.kl_weight == pytest.approx(0.3 * 0.98)


def test_a_kl_in_the_loss_is_steered_too():
    roles = shift(make_roles("hydra", ROLES))
    kl = KLConfig(weight=0.3, place="loss", estimator="k3", target=1e-3, horizon=160.0)
    data = make_data(roles, kl=kl)
    weights = [next(iter(data.train_dataloader())).kl_weight for _ in range(3)]
    assert weights == pytest.approx([0.3, 0.306, 0.306 * 1.02])


@pytest.mark.parametrize("arm", ARMS)
def test_every_role_reads_the_rollout_under_the_view_of_its_arm(arm: str):
    roles = shift(make_roles("hydra", ROLES))
    experience = make_data(roles, arm, sampling={"value_shadow": True}).collect()
    replays = ARMS[arm].replays
    found = {"policy": experience.old_logps, "reference": experience.ref_logps, "value": experience.values}
    for role, shadow in {"policy": replays, "reference": replays, "value": True}.items():
        expected, other = (seen_by(roles, role, experience.rollout, view) for view in (shadow, not shadow))
        assert (found[role] - expected).abs().max() < 1e-4, role
        # where nothing is evicted, both views are one
        assert ((found[role] - other).abs().max() > 1e-2) == (arm != "dense"), role
    dense = make_data(roles, arm, sampling={"value_shadow": False}).collect()
    assert (dense.values - seen_by(roles, "value", dense.rollout, False)).abs().max() < 1e-4


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
    with pytest.raises(ValueError, match=r"give the data module UpdateConfig\(learner_parts=module"):
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
        with pytest.raises(ValueError, match=f"{name}={value} leaves nothing to learn from"):
            PPO.check_options(**(options | {name: value}))
