from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from lit_rlkv.config.schema import KLConfig
from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import replay_logps
from lit_rlkv.objectives.corrections import Correction, truncated, unweighted
from lit_rlkv.objectives.reduction import AGGREGATIONS
from lit_rlkv.rollout import generate
from tests.hand_built import ARMS, REPLAY, gradients_of, make_datamodule, make_module, make_roles, shift
from tests.tiers import slow


def weights_by_definition(arm, rho, response_mask):
    """Each arm by its own definition, as loops over tokens."""
    weight, is_counted = torch.zeros_like(rho), response_mask.clone()
    for row, column in response_mask.nonzero().tolist():
        r = float(rho[row, column])
        if arm in ("dense", "naive", "shadow"):
            weight[row, column] = 1.0
        elif arm == "tis":
            weight[row, column] = min(r, 2.0)
        elif arm == "mis":
            weight[row, column] = r if 0.5 <= r <= 2.0 else 0.0
        else:
            has_veto = any(float(x) < 1e-4 for x in rho[row][response_mask[row]])
            is_kept = 0.5 <= r <= 1.5 and not has_veto
            weight[row, column] = min(r, 1.5) if is_kept else 0.0
            is_counted[row, column] = is_kept
    if arm == "sparse_rl" and is_counted.any():
        weight = weight / weight[is_counted].mean()
    return weight, is_counted


DEVICES = [slow("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
"""On a CPU the kernels are interpreted."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arm", ["dense", "shadow"])
def test_a_training_step_is_that_of_the_definitions_on_any_device(arm, device):
    roles, correction = shift(make_roles()), ARMS[arm]
    data = make_datamodule(roles, correction=correction)
    batches = list(data.splitter.minibatches(data.collect()))
    there = deepcopy(roles).to(device)
    kernels = "triton" if device == "cpu" else "auto"

    def after_a_step(of, device):
        module = make_module(of, replays=correction.replays)
        found = gradients_of(module, [batch.to(device) for batch in batches])
        torch.optim.SGD(module.parameters(), lr=1e-2).step()
        weights = {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}
        return {name: gradient.cpu() for name, gradient in found.items()}, weights

    with use_kernels("reference"):
        expected = after_a_step(roles, "cpu")
    with use_kernels(kernels):
        found = after_a_step(there, device)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()))
    assert max(float(value.abs().max()) for value in expected[0].values()) > 1e-3


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("arm", list(ARMS))
def test_loss_equals_its_definition(arm, aggregation):
    roles = shift(make_roles())
    correction = ARMS[arm]
    module = make_module(roles, replays=correction.replays)
    data = make_datamodule(roles, correction=correction, aggregation=aggregation)
    experience = data.collect()
    (batch,) = data.splitter.minibatches(experience)
    # a policy that has moved since the rollout: some ratios leave the clip range
    for name, parameter in roles.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(2.0)
    loss = float(module.training_step(batch, 0)["policy_loss"])

    rollout = batch.rollout
    response_mask = rollout.response_mask
    with torch.no_grad(), acting_as(roles, "policy") as backbone:
        logps = replay_logps(backbone, rollout, shadow=correction.replays)
    old = batch.old_logps
    weight, is_counted = weights_by_definition(arm, (old - rollout.rollout_logps).exp(), response_mask)
    expected = 0.0
    n_sequences = sum(bool(row.any()) for row in is_counted)
    for row, column in is_counted.nonzero().tolist():
        ratio = float((logps - old)[row, column].exp())
        advantage = float(batch.advantages[row, column])
        gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        if aggregation == "token":
            share = 1 / int(is_counted.sum())
        elif aggregation == "sequence":
            share = 1 / int(is_counted[row].sum()) / n_sequences
        else:
            share = 1 / 10 / n_sequences
        expected -= float(weight[row, column]) * gain * share
    assert expected != 0.0
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_replay_out_of_bypass_mode_scores_the_policy_under_the_mask():
    roles, arm = shift(make_roles()), Correction(False, True, truncated, bypass_mode=False)
    experience = make_datamodule(roles, correction=arm).collect()
    rollout = experience.rollout
    with torch.no_grad(), acting_as(roles, "policy") as backbone:
        replayed, dense = (replay_logps(backbone, rollout, shadow=shadow) for shadow in (True, False))
    torch.testing.assert_close(experience.old_logps, replayed, rtol=0, atol=1e-5)
    assert (experience.old_logps - dense).abs().max() > 0.05  # the control: another view
    ratio = (experience.old_logps - rollout.rollout_logps)[rollout.response_mask].exp()
    assert torch.equal(experience.weights.weight[rollout.response_mask], ratio.clamp(max=2.0))


def loss_of(correction: Correction, monkeypatch, *, residual: float) -> float:
    """The loss of the first update, with log-probs of the sampler that are off by up to `residual` nats."""

    def imprecise(*args, **kwargs):
        rollout = generate(*args, **kwargs)
        noise = torch.empty_like(rollout.rollout_logps).uniform_(
            -residual, residual, generator=torch.Generator().manual_seed(0)
        )
        return replace(rollout, rollout_logps=rollout.rollout_logps + noise * rollout.response_mask)

    monkeypatch.setattr("lit_rlkv.experience.sample.generate", imprecise)
    roles = shift(make_roles())
    data = make_datamodule(roles, correction=correction)
    (batch,) = data.splitter.minibatches(data.collect())
    return float(make_module(roles, replays=True).training_step(batch, 0)["policy_loss"])


def test_weights_on_what_rounding_left_change_the_loss_only_where_it_left_something(monkeypatch):
    corrected, bypassing = Correction(False, True, truncated), REPLAY
    found = {
        (name, residual): loss_of(arm, monkeypatch, residual=residual)
        for name, arm in (("corrected", corrected), ("bypassing", bypassing))
        for residual in (0.0, 0.3)
    }
    assert found["corrected", 0.0] == pytest.approx(found["bypassing", 0.0], abs=1e-5)
    assert abs(found["corrected", 0.3] - found["bypassing", 0.3]) > 1e-3
    # Uncorrected weights: π_old is right again, and the first ratio 1, so that only the weights are left.
    unweighted_loss = loss_of(Correction(False, True, unweighted), monkeypatch, residual=0.3)
    assert unweighted_loss == pytest.approx(found["corrected", 0.0], abs=1e-5)


def test_reference_kl_is_zero_for_the_reference_and_weighs_into_the_loss():
    roles = make_roles()
    module = make_module(roles)
    batch = next(iter(make_datamodule(roles, kl=KLConfig(weight=0.5)).train_dataloader()))
    assert float(module.training_step(batch, 0)["kl"]) == pytest.approx(0.0, abs=1e-6)

    roles = shift(make_roles())
    module = make_module(roles)
    batch = next(iter(make_datamodule(roles, kl=KLConfig(weight=0.5)).train_dataloader()))
    found = module.training_step(batch, 0)
    assert float(found["kl"]) > 1e-3
    with torch.no_grad(), acting_as(roles, "reference") as backbone:
        ref = replay_logps(backbone, batch.rollout)
    with torch.no_grad(), acting_as(roles, "policy") as backbone:
        log_ratio = ref - replay_logps(backbone, batch.rollout)
    k3 = (log_ratio.exp() - 1 - log_ratio) * batch.loss_weight
    expected = float(found["policy_loss"]) + 0.5 * float(k3.sum())
    assert found["loss"].item() == pytest.approx(expected, abs=1e-5)
