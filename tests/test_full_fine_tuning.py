"""GRPO on all weights, `roles=full`: what moves and what does not, under every cache and correction."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from lit_rlkv.config.commands import ExportConfig
from lit_rlkv.config.options import convert
from lit_rlkv.evaluate import evaluate
from lit_rlkv.export import export
from lit_rlkv.runs.open_run import find_run, open_run
from lit_rlkv.stages.export import policy_logits, probe_tokens
from tests.hand_built import ARMS, gradients_of, make_datamodule, make_model, make_module, make_roles
from tests.test_resume import assert_same_run
from tests.tiers import covering, short_tier
from tests.whole_runs import config, rows_of, run, scoring

FULL = [
    *("stages=[rl]", "algorithm=grpo", "roles=full", "optimizer.lr=0.003", "diagnostics=none"),
    *("sft.n_steps=100", "sft.optimizer.lr=0.01", "reward=mixed", "callbacks.samples_every=9"),
]
KL = "algorithm.kl.weight=0.1"
PREFIX = "roles.backbones."


@pytest.fixture(scope="module")
def runs(tmp_path_factory, share_sft_model) -> Path:
    """A folder with the SFT model that all runs start from, and a run of three iterations with a KL."""
    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder, *FULL))
    run(folder, "kl", *FULL, KL, "experiment=shadow", "algorithm.n_iterations=3")
    return folder


def start_weights(folder):
    return load_file(folder / "backbone" / "model.safetensors")


def trained_weights(folder):
    (last,) = sorted((folder / "checkpoints").glob("iteration-*"))[-1:]
    return load_file(last / "trainable.safetensors")


def test_every_weight_of_the_policy_moves_and_the_reference_stays_bitwise(runs):
    start = start_weights(runs / "kl")
    trained = trained_weights(runs / "kl")
    assert trained.keys() == {f"{PREFIX}policy.{name}" for name in start}
    assert not any(torch.equal(trained[f"{PREFIX}policy.{name}"], start[name]) for name in start)
    _, module = open_run(find_run(runs / "kl"))
    reference = module.roles.backbone("reference")
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert all(torch.equal(parameter, start[name]) for name, parameter in reference.named_parameters())
    policy = dict(module.roles.backbone("policy").named_parameters())
    assert all(torch.equal(policy[name], trained[f"{PREFIX}policy.{name}"]) for name in policy)


def test_the_kl_to_the_frozen_copy_grows_from_zero(runs):
    one_step = ["algorithm.n_iterations=1", "algorithm.n_minibatches=1"]
    run(runs, "first", *FULL, KL, "experiment=shadow", *one_step)
    (first,), last = rows_of(runs / "first"), rows_of(runs / "kl")[-1]
    assert float(first["kl"]) == pytest.approx(0, abs=1e-9)
    assert float(last["kl"]) > 0.01


def test_there_is_a_second_backbone_only_for_a_kl(runs):
    run(runs, "alone", *FULL, "experiment=shadow", "algorithm.n_iterations=1")
    for name, expected in (("alone", {"policy"}), ("kl", {"policy", "reference"})):
        _, module = open_run(find_run(runs / name))
        # reward=mixed adds the reward model, a frozen copy too
        assert {*module.roles.backbones} == expected | {"reward"}
        assert not any("lora" in parameter for parameter, _ in module.named_parameters())


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(runs):
    options = [*FULL, KL, "experiment=shadow", "algorithm.lr_schedule=constant"]
    run(runs, "straight", *options, "algorithm.n_iterations=4")
    run(runs, "resumed", *options, "algorithm.n_iterations=2")
    assert not torch.equal(*(trained_weights(runs / name)[f"{PREFIX}policy.model.norm.weight"]
                             for name in ("straight", "resumed")))  # fmt: skip
    run(runs, "resumed", *options, "algorithm.n_iterations=4", resumes=True)
    assert_same_run(runs / "resumed", runs / "straight")


def test_export_and_evaluation_take_the_trained_weights(runs, tmp_path):
    folder, found = export(convert(ExportConfig, {"ckpt": str(runs / "kl"), "to": str(tmp_path / "model")}))
    assert not found.has_adapter
    _, module = open_run(find_run(runs / "kl"))
    input_ids = probe_tokens(module.roles.backbone("policy"))
    with torch.no_grad():
        exported, start = (
            AutoModelForCausalLM.from_pretrained(path)(input_ids).logits
            for path in (folder, runs / "kl" / "backbone")
        )
    expected = policy_logits(module.roles, input_ids)
    torch.testing.assert_close(exported, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(start, expected, atol=1e-2, rtol=1e-2)
    rows = {row.cache: row for row in evaluate(scoring(runs / "kl")).rows}
    assert rows["dense"].kl == pytest.approx(0, abs=1e-5)
    assert all(row.replay_gap < 1e-4 for row in rows.values())


CROSSES = [
    (correction, policy, distillation)
    for correction in ARMS
    for policy in ("random", "snapkv", "h2o", "streaming", "dense")
    for distillation in ("none", "sparse_student", "dense_student")
    if distillation == "none" or "dense" not in (correction, policy)
]


SHORT = [
    ("shadow", "random", "sparse_student"),
    ("dense", "dense", "none"),
]


@pytest.mark.parametrize(
    ("correction", "policy", "distillation"), short_tier(dict.fromkeys([*SHORT, *covering(CROSSES)]), SHORT)
)
def test_all_weights_train_with_every_correction_cache_and_distillation(
    runs, correction, policy, distillation
):
    name = f"{correction}-{policy}-{distillation}"
    options = [f"correction={correction}", f"cache.policy={policy}", f"distillation={distillation}"]
    run(runs, name, *FULL, "experiment=none", *options)
    rows, start, trained = rows_of(runs / name), start_weights(runs / name), trained_weights(runs / name)
    assert not any(torch.equal(trained[f"{PREFIX}policy.{key}"], start[key]) for key in start)
    for row in rows:
        assert float(row["grad_norm"]) > 0
        assert ("smd/kl" in row) == (distillation != "none")
    if correction in ("dense", "shadow"):
        assert 0 < float(rows[0]["kv/replay_gap"]) < 1e-4


def plain_gradients(rollout, advantages):
    """Gradients of −Σ A · log π / n over responses of equal weight, by transformers' own forward and loss."""
    model = make_model().train()
    model.set_attn_implementation("eager")
    positions = (rollout.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(rollout.input_ids, rollout.attention_mask.long(), position_ids=positions).logits
    token_logps = -cross_entropy(logits[:, :-1].transpose(1, 2), rollout.input_ids[:, 1:], reduction="none")
    is_response = rollout.response_mask[:, 1:]
    per_response = (token_logps * advantages[:, 1:] * is_response).sum(dim=1) / is_response.sum(dim=1)
    (-per_response.mean()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("arm", "is_plain"), [("dense", True), ("shadow", False)])
def test_the_first_gradient_of_all_weights_is_that_of_plain_transformers_with_all_keys(arm, is_plain):
    module = make_module(make_roles("ppo", needed=("policy",)))
    (batch,) = make_datamodule(module.roles, correction=ARMS[arm]).train_dataloader()
    found = gradients_of(module, [batch])
    expected = plain_gradients(batch.rollout, batch.advantages)
    assert found.keys() == {f"{PREFIX}policy.{name}" for name in expected}
    errors = [
        float((found[f"{PREFIX}policy.{name}"] - gradient).norm() / gradient.norm())
        for name, gradient in expected.items()
    ]
    assert (max(errors) < 1e-4) == is_plain
    assert is_plain or min(errors) > 1e-3
