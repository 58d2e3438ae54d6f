from dataclasses import replace

import pytest
import torch

from lit_rlkv.callbacks.shadow_distillation import ShadowDistillation
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import response_hidden, response_logps_and_entropy
from lit_rlkv.modules.base import StepOutputs
from tests.hand_built import (
    TRUNCATED,
    make_datamodule,
    make_module,
    make_roles,
    plain_logits,
    replayed,
    shift,
)


@pytest.fixture(params=[{}, TRUNCATED], ids=["whole vocabulary", "truncated"])
def run(request):
    torch.manual_seed(0)
    roles = shift(make_roles(), std=0.1)
    module = make_module(roles)
    batch = next(iter(make_datamodule(roles, rollout=request.param).train_dataloader()))
    return module, batch


def outputs_of(module, batch):
    with acting_as(module.roles, "policy") as backbone:
        hidden = response_hidden(backbone, batch.rollout, shadow=module.replays)
        return StepOutputs(hidden, *response_logps_and_entropy(backbone, batch.rollout, hidden, 1.0))


def full_log_softmax(module, batch, role, *, shadow):
    rollout = batch.rollout
    with acting_as(module.roles, role) as backbone:
        return plain_logits(backbone, rollout, replayed(rollout, shadow=shadow)).log_softmax(-1)


def expected_kl(batch, log_p, log_q):
    per_action = (log_p.exp() * (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return per_action.sum() / batch.n_response_tokens


@pytest.mark.parametrize("teacher", ["policy", "reference"])
@pytest.mark.parametrize("direction", ["sparse_student", "dense_student"])
@pytest.mark.parametrize("replays", [True, False])
def test_loss_is_the_full_vocabulary_kl_of_teacher_and_student(run, direction, teacher, replays):
    module, batch = run
    module.replays = replays
    losses, metrics = ShadowDistillation(direction, 0.5, teacher).loss_terms(
        module, batch, outputs_of(module, batch)
    )
    if direction == "sparse_student":
        log_p = full_log_softmax(module, batch, teacher, shadow=False)
        log_q = full_log_softmax(module, batch, "policy", shadow=True)
    else:
        log_p = full_log_softmax(module, batch, "policy", shadow=False)
        log_q = full_log_softmax(module, batch, teacher, shadow=True)
    expected = expected_kl(batch, log_p, log_q)
    assert expected.item() > 1e-3
    torch.testing.assert_close(losses["smd/loss"], 0.5 * expected, rtol=1e-4, atol=1e-6)
    assert float(metrics["smd/kl"]) > 0


@pytest.mark.parametrize("direction", ["sparse_student", "dense_student"])
def test_gradient_flows_through_the_student_only(run, direction):
    module, batch = run
    module.replays = True
    ours = ShadowDistillation(direction, 1.0, "policy").loss_terms(module, batch, outputs_of(module, batch))
    ours[0]["smd/loss"].backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()

    dense = full_log_softmax(module, batch, "policy", shadow=False)
    shadow = full_log_softmax(module, batch, "policy", shadow=True)
    if direction == "sparse_student":
        expected_kl(batch, dense.detach(), shadow).backward()
    else:
        expected_kl(batch, dense, shadow.detach()).backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)

    module.zero_grad()
    # The twin: without the stop-gradient the comparison above would fail.
    expected_kl(
        batch,
        full_log_softmax(module, batch, "policy", shadow=False),
        full_log_softmax(module, batch, "policy", shadow=True),
    ).backward()
    worst = max(
        float((gradients[n] - p.grad).abs().max()) for n, p in module.named_parameters() if p.grad is not None
    )
    assert worst > 1e-4


@pytest.mark.parametrize(("weight", "replays"), [(0.5, True), (0.0, True), (0.0, False)])
def test_the_anchor_is_the_kl_of_the_dense_policy_from_the_reference(run, weight, replays):
    module, batch = run
    module.replays = replays
    callback = ShadowDistillation("sparse_student", weight, "reference", anchor_weight=0.2)
    losses, metrics = callback.loss_terms(module, batch, outputs_of(module, batch))
    reference, policy = (full_log_softmax(module, batch, r, shadow=False) for r in ("reference", "policy"))
    expected = 0.2 * expected_kl(batch, reference, policy)
    torch.testing.assert_close(losses["smd/anchor/loss"], expected, rtol=1e-4, atol=1e-6)
    if weight == 0:
        assert losses.keys() == {"smd/anchor/loss"}
        assert metrics.keys() == {"smd/anchor/loss", "smd/anchor/kl"}
        assert callback.needs == ("reference",)


def test_policy_weight_scales_the_algorithms_loss_and_not_the_distillation(run):
    module, batch = run
    callback = ShadowDistillation("sparse_student", 0.5, "reference")
    module.loss_terms = [callback.loss_terms]
    batch = replace(batch, advantages=batch.advantages + 1)  # of a group they add up to no loss at first
    whole = module.training_step(batch, 0)
    module.policy_weight = 0
    alone = module.training_step(batch, 0)
    assert (whole["loss"] - alone["loss"]).abs() > 0.1
    torch.testing.assert_close(alone["loss"], whole["smd/loss"], rtol=0, atol=0)
    torch.testing.assert_close(alone["policy_loss"], whole["policy_loss"], rtol=0, atol=0)


def test_training_step_adds_the_distillation_loss(run):
    module, batch = run
    plain = module.training_step(batch, 0)["loss"]
    callback = ShadowDistillation("sparse_student", 0.5, "reference")
    module.loss_terms = [callback.loss_terms]
    with_term = module.training_step(batch, 0)
    torch.testing.assert_close(with_term["loss"], plain + with_term["smd/loss"])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("backwards", 0.3, "reference"), "direction must be .* got 'backwards'"),
        (("sparse_student", 0.3, "critic"), "teacher must be .* got 'critic'"),
        (("sparse_student", 0.0, "reference"), "weight"),
    ],
)
def test_invalid_options_are_refused(arguments, key):
    with pytest.raises(ValueError, match=key):
        ShadowDistillation(*arguments)
