"""Tests of the module's part that trains the scorer of evictions."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv.experience.advantages import GAEAdvantage
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policies import Learned
from lit_rlkv.models.eviction_logps import KeyRecord, decision_scores, decisions_of
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.kv_scorer import add_kv_scorer, kv_scorer_of
from lit_rlkv.models.replay import response_hidden
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.modules.evictions import EvictionLearner
from lit_rlkv.types import NEVER, Record, Rollout, TrainBatch
from tests.hand_built import (
    gradients_of,
    make_datamodule,
    make_model,
    make_module,
    make_ppo,
    make_roles,
    shift,
    steps_of,
    train_here,
)
from tests.models import set_logps_reference

SPEC = CacheSpec("learned", budget=7, interval=2, sink=1, window=2)
OPTIONS = {"weight": 1.0, "clip": 0.2, "kl_coef": 0.0}


def learning_roles(**options: Any) -> Roles:
    roles = shift(make_roles(**options))
    torch.manual_seed(3)
    scorer = add_kv_scorer(roles.backbone("policy"), Learned())
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return roles


def learner_of(roles: Roles, **options: Any) -> EvictionLearner:
    scorer = kv_scorer_of(roles.backbone("policy"))
    assert scorer is not None
    return EvictionLearner(SPEC, scorer, **OPTIONS | options)


def make_run(make: Any = make_module, needed: Sequence[str] = ("policy", "reference"), **data: Any):
    """A module that learns from evictions, and its datamodule."""
    checkpoints = data.pop("checkpoints_layers", False)
    roles = learning_roles(needed=needed, checkpoints_layers=checkpoints)
    module = make(roles, evictions=learner_of(roles), eviction_lr_scale=5.0)
    datamodule = make_datamodule(roles, spec=SPEC, learner_parts=module.learner_parts, **data)
    datamodule.trains_evictions = True
    return module, datamodule


def of_scorer(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if "kv_scorer" in name}


def all_survivors(n_columns: int = 10, now: int = 8, n_kept: int = 2) -> Rollout:
    """A row for each set of survivors that the first head of the first layer can have at one compaction."""
    candidates = range(SPEC.sink, now - SPEC.window)
    sets = list(combinations(candidates, n_kept))
    table = torch.full((len(sets), 2, 2, n_columns), NEVER, dtype=torch.int32)
    for row, kept in enumerate(sets):
        for column in candidates:
            table[row, 0, 0, column] = NEVER if column in kept else now
    shape = (len(sets), n_columns)
    response_mask = (torch.arange(n_columns) >= 7).expand(shape)
    input_ids = torch.arange(1, n_columns + 1).expand(shape)
    is_token, logps = torch.ones(shape, dtype=torch.bool), torch.zeros(shape)
    return Rollout(input_ids, is_token, response_mask, logps, Record(table), 0)


def batch_of(rollout: Rollout, advantages: Tensor, **changes: Any) -> TrainBatch:
    zeros = torch.zeros_like(rollout.rollout_logps)
    batch = TrainBatch(
        rollout=rollout,
        advantages=advantages[:, None] * rollout.response_mask,
        old_logps=zeros,
        ref_logps=zeros,
        correction=zeros + 1,
        loss_weight=rollout.response_mask.float(),
        kl_coef=0.0,
        n_response_tokens=1,
        is_first_update=True,
        ends_step=True,
        n_decisions=1,
    )
    return replace(batch, **changes)


def recorded(roles: Roles, rollout: Rollout) -> KeyRecord:
    record = KeyRecord()
    with torch.no_grad(), acting_as(roles, "policy") as backbone:
        response_hidden(backbone, rollout, shadow=True, probe=record)
    return record


def test_the_gradient_is_that_of_the_expected_reward_over_all_survivor_sets():
    """∇ Σ p(S)·R(S) = Σ p(S)·R(S)·∇ log p(S); p by its definition, differentiated by autograd."""
    roles, rollout = learning_roles(), all_survivors()
    learner, backbone = learner_of(roles), roles.backbone("policy")
    rewards = torch.randn(len(rollout.input_ids), generator=torch.Generator().manual_seed(1))
    decisions = decisions_of(rollout, 0, 2, SPEC)
    assert decisions.now.tolist() == [[8]] * 10
    keys, values = recorded(roles, rollout).take(0)
    scores = decision_scores(learner.scorer, 0, keys, values, decisions.now)[:, 0, 0]
    masks = [each[:, 0, 0, : scores.shape[1]] for each in (decisions.is_kept, decisions.is_candidate)]
    p = set_logps_reference.set_logps(scores.double(), *masks).exp()
    assert float(p.detach().sum()) == pytest.approx(1.0, abs=1e-5)
    parameters = list(learner.scorer.parameters())
    expected = torch.autograd.grad((p * rewards).sum(), parameters, allow_unused=True)

    batch = batch_of(rollout, (p.detach() * rewards).float())
    losses, _ = learner.terms(backbone, batch, recorded(roles, rollout))
    found = torch.autograd.grad(losses["eviction_loss"], parameters)
    assert max(float(one.abs().max()) for one in found) > 1e-2
    for one, exact in zip(found, expected, strict=True):
        exact = torch.zeros_like(one) if exact is None else exact
        torch.testing.assert_close(-one, exact.to(one.dtype), rtol=1e-3, atol=1e-5)


def test_that_comparison_notices_a_survivor_too_few():
    roles, rollout = learning_roles(), all_survivors()
    learner, backbone = learner_of(roles), roles.backbone("policy")
    advantages = torch.ones(len(rollout.input_ids))

    def gradient(changed: Rollout) -> Tensor:
        losses, _ = learner.terms(backbone, batch_of(changed, advantages), recorded(roles, changed))
        return torch.autograd.grad(losses["eviction_loss"], list(learner.scorer.parameters()))[2]

    table = rollout.evicted_at.clone()
    table[:, 0, 0, 1] = 8
    gap = (gradient(rollout) - gradient(rollout.with_record(evicted_at=table))).abs().max()
    assert float(gap) > 1e-2


@pytest.mark.parametrize("make", [make_module, make_ppo])
def test_the_loss_trains_the_scorer_alone(make: Any):
    needed = ("policy", "reference", "value") if make is make_ppo else ("policy", "reference")
    options = {"advantage": GAEAdvantage(1.0, 0.95)} if make is make_ppo else {}
    module, data = make_run(make, needed, **options)
    batches = list(data.splitter.minibatches(data.collect()))
    learner, module.evictions = module.evictions, None
    without = gradients_of(module, batches)
    module.evictions = learner
    found = gradients_of(module, batches)
    scorer = of_scorer(found)
    assert all(float(gradient.abs().max()) > 0 for gradient in scorer.values())
    assert {*found} - {*without} == {*scorer}
    for name, gradient in without.items():
        assert torch.equal(found[name], gradient)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("tokens_per_pass", [30, 10_000])
def test_neither_micro_batches_nor_checkpointing_change_its_gradient(checkpoints: bool, tokens_per_pass: int):
    module, data = make_run()
    (expected,) = (gradients_of(module, step) for step in steps_of(data.splitter.minibatches(data.collect())))
    module, data = make_run(tokens_per_pass=tokens_per_pass, checkpoints_layers=checkpoints)
    steps = steps_of(data.splitter.minibatches(data.collect()))
    assert (len(steps[0]) > 1) == (tokens_per_pass == 30)
    found = of_scorer(gradients_of(module, steps[0]))
    for name, gradient in of_scorer(expected).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def test_the_ratio_is_to_the_scorer_before_the_first_update():
    module, data = make_run(n_epochs=2)
    first, second = steps_of(data.splitter.minibatches(data.collect()))
    assert first[0].n_decisions > 0
    assert float(module.training_step(first[0], 0)["eviction/clip_ratio"]) == 0.0
    for parameter in module.evictions.scorer.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    moved = module.training_step(second[0], 0)
    assert float(moved["eviction/clip_ratio"]) > 0.05
    gain = -float(moved["eviction/loss"])
    assert gain == pytest.approx(clipped_gain(module, second[0]), rel=1e-3)


def clipped_gain(module: PolicyModule, batch: TrainBatch) -> float:
    """The mean over decisions of the clipped gain, decision by decision."""
    learner = module.evictions
    assert learner is not None
    assert learner._old is not None
    rollout, total, n = batch.rollout, 0.0, 0
    record = recorded(module.roles, rollout)
    for layer in range(2):
        keys, values = record.take(layer)
        decisions = decisions_of(rollout, layer, 2, SPEC)
        logps = []
        for scorer in (learner.scorer, learner._old):
            with torch.no_grad():
                scores = decision_scores(scorer, layer, keys, values, decisions.now)
            masks = (each[..., : scores.shape[-1]] for each in (decisions.is_kept, decisions.is_candidate))
            logps.append(set_logps_reference.set_logps(scores.double(), *masks))
        for row, head, number in decisions.is_decision.nonzero().tolist():
            ratio = float((logps[0] - logps[1])[row, head, number].exp())
            column = int(decisions.now[row, number])
            tokens = rollout.response_mask[row].nonzero().flatten().tolist()
            before = [c for c in tokens if c <= column] or tokens[:1]
            advantage = float(batch.advantages[row, before[-1]]) if column < tokens[-1] else 0.0
            total += min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            n += 1
    assert n == batch.n_decisions
    return total / n


def test_training_moves_the_scorer_at_its_own_rate_and_reports_it():
    module, data = make_run(n_minibatches=2)
    before = [parameter.clone() for parameter in module.evictions.scorer.parameters()]
    optimizer = module.configure_optimizers()["optimizer"]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-2, 5e-2])
    (row,) = train_here(module, data, n_iterations=1).rows
    names = ("loss", "logp", "kl_uniform", "clip_ratio", "grad_norm")
    assert all(f"eviction/{name}" in row for name in names)
    assert row["eviction/logp"] < 0.0 < row["eviction/grad_norm"]
    moved = [bool((a != b).any()) for a, b in zip(module.evictions.scorer.parameters(), before, strict=True)]
    assert all(moved)


def test_a_kl_pulls_to_uniform_eviction():
    roles, rollout = learning_roles(), all_survivors()
    learner = learner_of(roles, kl_coef=1.0)
    nothing = torch.zeros(len(rollout.input_ids))
    for _ in range(2):
        record = recorded(roles, rollout)
        losses, metrics = learner.terms(roles.backbone("policy"), batch_of(rollout, nothing), record)
        losses["eviction_loss"].backward()
        kl = float(metrics["eviction/kl_uniform"])
        with torch.no_grad():
            for parameter in learner.scorer.parameters():
                assert parameter.grad is not None
                parameter -= 0.02 * parameter.grad
                parameter.grad = None
    record = recorded(roles, rollout)
    _, metrics = learner.terms(roles.backbone("policy"), batch_of(rollout, nothing), record)
    assert float(metrics["eviction/kl_uniform"]) < kl


def test_a_policy_that_does_not_draw_is_not_trained():
    spec = CacheSpec(Learned(samples=False), budget=7, interval=2, sink=1, window=2)
    with pytest.raises(ValueError, match="Learned must draw the survivors of rollouts to be trained"):
        EvictionLearner(spec, torch.nn.Linear(1, 1), **OPTIONS)
    EvictionLearner(SPEC, torch.nn.Linear(1, 1), **OPTIONS)


def test_a_model_without_a_scorer_is_refused_by_its_cache():
    roles = make_roles()
    with pytest.raises(ValueError, match=r"cache\.policy=learned needs the scorer that RL trains"):
        make_datamodule(roles, spec=SPEC).collect()
    assert kv_scorer_of(make_model()) is None
