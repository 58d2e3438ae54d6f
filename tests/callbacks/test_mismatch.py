import json
from dataclasses import replace

import pytest
import torch

from lit_rlkv.callbacks.mismatch import DenseMismatch, LayerMismatch
from lit_rlkv.callbacks.rollout_statistics import rollout_statistics
from lit_rlkv.diagnostics.distributions import layer_kls, view_overlap
from lit_rlkv.experience.budget_control import BudgetController
from lit_rlkv.experience.score import score_rollout
from lit_rlkv.models.hydra import acting_as
from tests.callbacks.measuring import measured
from tests.hand_built import ARMS, counted_forwards, make_datamodule, make_module, make_roles, shift

DENSE_NAMES = (
    "kl", "k3_kl", "chi2_token", "chi2_seq", "training_ppl", "training_log_ppl", "log_ppl_diff",
    "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio",
)  # fmt: skip


def roll_out(arm="shadow", layout="hydra", **options):
    roles = shift(make_roles(layout), std=0.1)
    return roles, make_datamodule(roles, correction=ARMS[arm], **options).collect()


def test_a_replaying_learner_reports_the_mismatch_of_a_dense_learner():
    roles, replayed = roll_out("shadow")
    _, naive = roll_out("naive")
    assert torch.equal(replayed.rollout.input_ids, naive.rollout.input_ids)
    found, _ = measured(DenseMismatch(), roles, replayed)
    expected = rollout_statistics(naive)
    for name in DENSE_NAMES:
        assert found[f"kv/dense_{name}"] == expected[f"rollout_corr/{name}"], name
    assert found["kv/dense_k3_kl"] > 1e-3
    assert rollout_statistics(replayed)["rollout_corr/k3_kl"] == 0.0  # what it would say of itself


def test_the_lowest_overlap_by_position_steers_the_budget_of_the_next_rollout():
    roles = shift(make_roles(), std=0.1)
    data, resumed = make_datamodule(roles), make_datamodule(roles)
    for each in (data, resumed):
        each.budget = BudgetController(each.cache, target=0.999)
    diagnostic = DenseMismatch()
    diagnostic.budget = data.budget
    before, first = data.cache.budget, data.collect()
    found, _ = measured(diagnostic, roles, first)
    assert min(value for name, value in found.items() if name.startswith("kv/overlap_p05/")) < 0.999
    data.iteration += 1
    resumed.load_state_dict(data.state_dict())
    second, again = data.collect(), resumed.collect()
    assert (first.budget, second.budget) == (before, data.cache.budget)
    assert before < data.cache.budget
    assert rollout_statistics(second)["kv/budget"] == data.cache.budget
    assert torch.equal(again.rollout.evicted_at, second.rollout.evicted_at)
    assert second.rollout.kv_bytes > first.rollout.kv_bytes
    assert make_datamodule(roles).collect().budget is None


def test_a_dense_learner_needs_no_further_forward():
    roles, naive = roll_out("naive")
    found, _ = measured(DenseMismatch(), roles, naive, "naive")
    replayed, _ = measured(DenseMismatch(), roles, naive, "shadow")
    assert found == replayed


def test_a_dense_learner_that_takes_the_sampler_for_pi_old_reports_the_same_mismatch():
    roles, naive = roll_out("naive")
    bypassing = replace(ARMS["naive"], bypass_mode=True)
    data = make_datamodule(roles, correction=bypassing)
    found, _ = measured(DenseMismatch(), roles, data.collect(), "naive")
    expected, _ = measured(DenseMismatch(), roles, naive, "naive")
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert found["kv/dense_k3_kl"] > 1e-3


def test_dense_rollouts_have_no_mismatch():
    roles, experience = roll_out("dense")
    found, _ = measured(DenseMismatch(), roles, experience, "dense")
    assert abs(found["kv/dense_k3_kl"]) < 1e-6
    assert found["kv/overlap_p05"] == pytest.approx(1.0, abs=1e-5)
    assert found["kv/arms/sequence_ratio/ess_seq"] == pytest.approx(1.0, abs=1e-4)


def test_overlap_is_of_the_rows_that_are_looked_at():
    roles, experience = roll_out()
    (all_rows, arrays), (few, few_arrays) = (
        measured(DenseMismatch(n_rows=n), roles, experience) for n in (99, 3)
    )
    assert all_rows["kv/overlap_mean"] != few["kv/overlap_mean"]
    assert all_rows["kv/dense_kl"] == few["kv/dense_kl"]  # of all rows, whatever n_rows is
    n_response_tokens = torch.tensor(arrays["n_response_tokens"])
    mean = (n_response_tokens * torch.tensor(arrays["overlap_mean"])).sum() / n_response_tokens.sum()
    assert all_rows["kv/overlap_mean"] == pytest.approx(float(mean), rel=1e-5)
    assert {len(values) for values in (*arrays.values(), *few_arrays.values())} == {len(n_response_tokens)}
    json.dumps(few_arrays, allow_nan=False)


def test_rows_may_come_in_several_passes():
    roles, experience = roll_out()
    whole, _ = measured(DenseMismatch(), roles, experience)
    layers, _ = measured(LayerMismatch(), roles, experience)
    for diagnostic, expected in ((DenseMismatch, whole), (LayerMismatch, layers)):
        with counted_forwards(roles) as at_once:
            measured(diagnostic(), roles, experience)
        with counted_forwards(roles) as forwards:  # three responses of up to 16 tokens at a time
            parts, _ = measured(diagnostic(tokens_per_pass=48), roles, experience)
        assert len(forwards) >= 2 * len(at_once)
        assert parts == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_overlaps_come_back_to_the_rows_they_are_of():
    roles, experience = roll_out()
    _, whole = measured(DenseMismatch(n_rows=5), roles, experience)
    _, parts = measured(DenseMismatch(n_rows=5, tokens_per_pass=1), roles, experience)
    expected, found = (
        torch.tensor([float("nan") if value is None else value for value in arrays["overlap_mean"]])
        for arrays in (whole, parts)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, equal_nan=True)
    measured_rows = expected[expected.isfinite()]
    assert (measured_rows - measured_rows.flip(0)).abs().max() > 1e-3  # another order would be seen


def test_layers_have_a_number_each_and_one_together():
    roles, experience = roll_out()
    found, arrays = measured(LayerMismatch(n_rows=5), roles, experience)
    assert set(found) == {"kv/layer_kl/0", "kv/layer_kl/1", "kv/layer_kl/all"}
    assert min(found.values()) > 1e-4
    assert arrays["layer_kl"] == [found["kv/layer_kl/0"], found["kv/layer_kl/1"]]
    assert arrays["all_layers_kl"] == found["kv/layer_kl/all"]


def test_all_measurements_are_at_the_temperature_that_sampled():
    roles = shift(make_roles(), std=0.1)
    experience = make_datamodule(roles, rollout={"temperature": 0.7}).collect()
    rollout, module, found = experience.rollout, make_module(roles), {}
    module.temperature = 0.7
    for diagnostic in (DenseMismatch(), LayerMismatch(n_rows=99)):
        diagnostic.on_fit_start(None, module)
        diagnostic.on_rollout_end(experience)
        found |= diagnostic.scalars
    for temperature, is_right in ((0.7, True), (1.0, False)):
        dense = score_rollout(roles, rollout, {"policy": False}, temperature=temperature)["policy"]
        with acting_as(roles, "policy") as backbone:
            overlap = view_overlap(backbone, rollout, temperature)
            kls = layer_kls(backbone, rollout, temperature).mean(dim=1)
        expected = {
            "kv/dense_kl": (rollout.rollout_logps - dense)[rollout.response_mask].mean(),
            "kv/overlap_mean": overlap[rollout.response_mask].mean(),
            "kv/layer_kl/0": kls[0],
        }
        for name, value in expected.items():
            assert (abs(found[name] - float(value)) < 1e-5) == is_right, name


@pytest.mark.parametrize("make", [DenseMismatch, LayerMismatch])
def test_without_evictions_no_forward_is_run(make):
    roles, experience = roll_out("dense")
    with counted_forwards(roles) as forwards:
        found, _ = measured(make(), roles, experience)
    assert forwards == []
    exact = {"kv/overlap_mean": 1.0, "kv/overlap_p05": 1.0, "kv/dense_k3_kl": 0.0, "kv/layer_kl/all": 0.0}
    assert {name: found[name] for name in exact if name in found} == {
        name: value for name, value in exact.items() if name in found
    }
    roles, experience = roll_out()
    with counted_forwards(roles) as forwards:
        measured(make(), roles, experience)
    assert forwards != []
