"""Distillation of another frozen model into the policy."""

from dataclasses import replace

import pytest
import torch

from lit_rlkv.callbacks.model_distillation import ModelDistillation
from lit_rlkv.models.hydra import acting_as
from tests.callbacks.test_shadow_distillation import expected_kl, outputs_of
from tests.hand_built import (
    ARMS,
    TRUNCATED,
    make_datamodule,
    make_model,
    make_module,
    make_roles,
    plain_logits,
    replayed,
    shift,
    train_here,
)

BIGGER = {"hidden_size": 48, "num_hidden_layers": 3}


def taught_by(teacher, **options):
    callback = ModelDistillation("a-teacher", **options)
    callback.teacher = teacher.eval().requires_grad_(False)
    return callback


def made(correction="shadow", rollout=None, std=0.1):
    torch.manual_seed(0)
    roles = shift(make_roles(), std=std)
    module = make_module(roles, replays=ARMS[correction].replays)
    data = make_datamodule(roles, correction=ARMS[correction], rollout=rollout)
    return module, next(iter(data.train_dataloader()))


def gradient_of(module, loss):
    module.zero_grad()
    loss.backward()
    return max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("beta", [1.0, 0.0])
def test_an_identical_teacher_gives_no_loss_and_no_gradient(beta):
    for correction, std, is_zero in [
        ("naive", 0.0, True),
        ("dense", 0.0, True),
        ("naive", 0.1, False),  # twins: another policy, and one that has lost keys
        ("shadow", 0.0, False),
    ]:
        module, batch = made(correction, std=std)
        losses, _ = taught_by(make_model(), beta=beta).loss_terms(module, batch, outputs_of(module, batch))
        loss = losses["teacher/loss"]
        assert (float(loss.detach().abs()) < 1e-9) == is_zero
        assert (gradient_of(module, loss) < 1e-8) == is_zero


@pytest.mark.parametrize("rollout", [{}, TRUNCATED], ids=["whole vocabulary", "truncated"])
@pytest.mark.parametrize("beta", [1.0, 0.0])
@pytest.mark.parametrize("correction", ["shadow", "naive"])
def test_loss_is_the_kl_to_a_teacher_of_another_size_that_sees_all_keys(correction, beta, rollout):
    module, batch = made(correction, rollout)
    callback = taught_by(make_model(1, **BIGGER), weight=0.5, beta=beta)
    losses, metrics = callback.loss_terms(module, batch, outputs_of(module, batch))
    dense, seen = (replayed(batch.rollout, shadow=shadow) for shadow in (False, True))
    with torch.no_grad(), acting_as(module.roles, "policy") as backbone:
        teacher = plain_logits(callback.teacher, batch.rollout, dense).log_softmax(-1)
        policy = plain_logits(backbone, batch.rollout, seen if module.replays else dense).log_softmax(-1)
    expected = expected_kl(batch, *((policy, teacher) if beta == 1 else (teacher, policy)))
    assert expected > 1e-3
    torch.testing.assert_close(losses["teacher/loss"].detach(), 0.5 * expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["teacher/kl"], expected, rtol=1e-4, atol=1e-6)


def test_padding_behind_the_teachers_vocabulary_changes_nothing():
    module, batch = made()
    plain, padded = make_model(1, **BIGGER), make_model(1, **BIGGER)
    padded.resize_token_embeddings(plain.config.vocab_size + 13)
    found = [
        taught_by(teacher).loss_terms(module, batch, outputs_of(module, batch))[0]["teacher/loss"]
        for teacher in (plain, padded)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)


def test_the_policy_learns_from_it_alone_and_the_teacher_stays():
    module, _ = made()
    module.policy_weight = 0.0
    callback = taught_by(make_model(1, **BIGGER))
    before = {name: value.clone() for name, value in callback.teacher.state_dict().items()}
    module.loss_terms = [callback.loss_terms]
    kls = [row["teacher/kl"] for row in train_here(module, make_datamodule(module.roles), 12).rows]
    assert kls[-1] < 0.8 * kls[0]
    for name, value in callback.teacher.state_dict().items():
        assert torch.equal(value, before[name])


def test_experts_of_the_sampler_are_not_the_teachers():
    module, batch = made()
    experts = torch.zeros(*batch.rollout.input_ids.shape[:1], 1, 1, batch.rollout.input_ids.shape[1])
    routed = replace(batch, rollout=batch.rollout.with_record(expert_ids=experts.to(torch.uint8)))
    callback, outputs = taught_by(make_model(1)), outputs_of(module, batch)
    found = callback.loss_terms(module, routed, outputs)[0]["teacher/loss"]
    assert torch.equal(found, callback.loss_terms(module, batch, outputs)[0]["teacher/loss"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weight": 0}, "weight must be a number above 0, got 0"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16 or null, got 'int8'"),
    ],
)
def test_invalid_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        ModelDistillation("a-teacher", **options)
