"""PPO's formulas, written out as loops over tokens in float64, and rollouts to compare with them."""

import math

import torch
from torch import Tensor

from lit_rlkv.config.schema import KLConfig
from lit_rlkv.experience.advantages import GAEAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.layouts import ROLES
from lit_rlkv.models.replay import replay_logps, response_hidden
from lit_rlkv.modules.ppo import PPO
from lit_rlkv.types import Rollout, TrainBatch
from tests.hand_built import ARMS, make_datamodule, make_roles, shift
from tests.modules.test_grpo import weights_by_definition

BOTH = (("policy", "value"),)
GAMMA, LAM = 0.9, 0.8
PAID = KLConfig(weight=0.3, place="reward", estimator="k1")
STD_FLOOR = 1e-4


def make_data(roles: Roles, arm: str = "shadow", **options) -> RolloutDataModule:
    options = {"advantage": GAEAdvantage(GAMMA, LAM), "kl": PAID, "aggregation": "token"} | options
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
        values = roles.head(role)(response_hidden(backbone, rollout, shadow=shadow))
        return torch.zeros(rollout.input_ids.shape).masked_scatter(rollout.response_mask, values).double()


def actions_of(rollout: Rollout) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in rollout.response_mask]


def credit_by_definition(
    experience: Experience, is_counted: Tensor, kl_coef: float = PAID.weight, mistake: str = ""
) -> tuple[Tensor, Tensor]:
    """r_t = −β·k1 + 1[t = T]·R, δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}; whitened A, and A + V."""
    old, ref = experience.old_logps.double(), experience.ref_logps.double()
    values = experience.values.double()
    advantages, returns = torch.zeros_like(old), torch.zeros_like(old)
    for row, columns in enumerate(actions_of(experience.rollout)):
        after, next_value = 0.0, float(values[row, columns[-1]]) if mistake == "bootstrap" else 0.0
        for column in reversed(columns):
            reward = -kl_coef * float(old[row, column] - ref[row, column])
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
        returns = torch.where(experience.rollout.response_mask, whitened + values, 0.0)
    return torch.where(is_counted, whitened, 0.0), returns


def losses_by_definition(
    roles: Roles, experience: Experience, arm: str = "shadow", value_shadow: bool = True, mistake: str = ""
) -> dict[str, float]:
    """−Σ w·min(ρA, clip(ρ)A) / n_counted and Σ 0.5·max((V − R)², (clip(V) − R)²) / n_response_tokens."""
    rollout, old = experience.rollout, experience.old_logps.double()
    logps = seen_by(roles, "policy", rollout, ARMS[arm].replays)
    values = seen_by(roles, "value", rollout, value_shadow)
    rho = (old - rollout.rollout_logps.double()).exp()
    weight, is_counted = weights_by_definition(arm, rho, rollout.response_mask)
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
            value_loss += 0.5 * worse((v - r) ** 2, (v_clip - r) ** 2) / int(rollout.response_mask.sum())
    log_ratio = (logps - old)[rollout.response_mask].tolist()
    approx_kl = sum(math.exp(x) - 1 - x for x in log_ratio) / len(log_ratio)  # KL(π_old ‖ π) by k3
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "approx_kl": approx_kl}
    return losses | {"loss": policy_loss + 0.5 * value_loss}


def step(module: PPO, batch: TrainBatch) -> dict[str, float]:
    """Return the loss and metrics of a micro-batch."""
    return {name: float(value.detach()) for name, value in module.training_step(batch, 0).items()}
