import time

import pytest
import torch

from lit_rlkv.callbacks import performance
from lit_rlkv.callbacks.performance import Performance
from lit_rlkv.diagnostics.flops import flop_costs, rollout_work
from lit_rlkv.models.hydra import acting_as
from tests.callbacks.measuring import assert_same_training, trained
from tests.hand_built import DigitsAreGood, make_datamodule, make_module, make_roles, shift

TERA = 1e12


class Clock:
    """A clock that a test winds by hand."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(performance.time, "perf_counter", lambda: self.now)

    def phase(self, diagnostic, name, seconds, iteration=0):
        diagnostic.on_phase_start(name, iteration)
        self.now += seconds
        diagnostic.on_phase_end(name, iteration)


def started(**options):
    roles = shift(make_roles())
    diagnostic = Performance(**options)
    diagnostic.on_fit_start(None, make_module(roles))
    return roles, diagnostic


def test_times_and_speeds_match_hand_arithmetic(monkeypatch):
    roles, diagnostic = started(peak_flops=1e9)
    experience = make_datamodule(roles).collect()
    with acting_as(roles, "policy") as backbone:
        costs = flop_costs(backbone)
    assert costs is not None
    work, n_positions = rollout_work(experience.rollout, 4)
    flops = float(costs.forward(work)) + n_positions * costs.forward_per_position
    clock = Clock(monkeypatch)
    for name, seconds in {"rollout": 4.0, "score": 2.0, "reward": 0.5}.items():
        clock.phase(diagnostic, name, seconds)
        clock.now += 50.0  # what happens between phases belongs to none
    diagnostic.on_rollout_end(experience)
    found = diagnostic.scalars
    assert [found[f"time/{name}"] for name in ("rollout", "score", "reward")] == [4.0, 2.0, 0.5]
    n_response_tokens = int(experience.rollout.response_mask.sum())
    assert found["perf/tokens_per_second/rollout"] == n_response_tokens / 4
    assert found["perf/tflops/rollout"] == pytest.approx(flops / 4 / TERA)
    assert found["perf/mfu/rollout"] == pytest.approx(flops / 4 / 1e9)


def test_an_update_is_measured_by_the_passes_that_were_run(monkeypatch):
    roles, diagnostic = started(peak_flops=1e9)
    module, data = make_module(roles), make_datamodule(roles)
    (batch,) = data.splitter.minibatches(data.collect())
    clock = Clock(monkeypatch)
    diagnostic.on_phase_start("update", 0)
    module.training_step(batch, 0)["loss"].backward()
    clock.now += 8.0
    diagnostic.on_phase_end("update", 0)
    found = diagnostic.scalars
    # Every token but those of the last column, which response_queries nothing.
    assert found["perf/tokens_per_second/update"] == int(batch.rollout.attention_mask[:, :-1].sum()) / 8
    assert found["perf/mfu/update"] == pytest.approx(found["perf/tflops/update"] * TERA / 1e9)
    assert found["perf/tflops/update"] * TERA * 8 > 6 * float(batch.rollout.response_mask.sum())
    assert "time/update" not in found  # the loop's own


def test_without_a_known_peak_only_what_was_achieved_is_logged():
    rows, *_ = trained([Performance()])
    assert {name for name in rows[1] if name.startswith("perf/")} == {
        f"perf/{what}/{phase}" for what in ("tokens_per_second", "tflops") for phase in ("rollout", "update")
    }
    rows, *_ = trained([Performance(peak_flops=1e12)])
    for phase in ("rollout", "update"):
        assert rows[1][f"perf/mfu/{phase}"] == pytest.approx(rows[1][f"perf/tflops/{phase}"])


def test_the_peak_is_looked_up_once_at_the_precision_of_the_products(monkeypatch):
    asked = []

    def look_up(device, dtype):
        asked.append((device.type, dtype))
        return 2e12

    monkeypatch.setattr(performance, "peak_flops", look_up)
    rows, *_ = trained([Performance()], precision="bf16-mixed")
    assert asked == [("cpu", torch.bfloat16)]
    assert rows[1]["perf/mfu/update"] == pytest.approx(rows[1]["perf/tflops/update"] / 2)
    trained([Performance()])
    assert asked[1:] == [("cpu", torch.float32)]
    trained([Performance(peak_flops=1e9)])
    assert len(asked) == 2


class SlowToJudge(DigitsAreGood):
    def score(self, problem, completion):
        time.sleep(0.01)
        return super().score(problem, completion)


def test_phases_are_parts_of_what_the_loop_times():
    rows, *_ = trained([Performance()], task=SlowToJudge(n_terms=3))
    for row in rows:
        parts = [row[f"time/{phase}"] for phase in ("rollout", "score", "reward")]
        assert 0 < min(parts) < sum(parts) < row["time/data"]
        assert row["time/reward"] > 16 * 0.01
        assert row["time/diagnostics/performance"] > 0


def test_it_measures_at_its_interval():
    rows, *_ = trained([Performance(every=2)])
    first, second = ({name for name in row if name.split("/")[0] in ("perf", "memory")} for row in rows)
    assert first
    assert not second
    assert "time/rollout" in rows[0]
    assert "time/rollout" not in rows[1]


def test_a_diagnostic_between_the_phases_is_in_none_of_them(monkeypatch):
    _, diagnostic = started()
    clock = Clock(monkeypatch)
    clock.phase(diagnostic, "reward", 1.0)
    clock.now += 7.0
    clock.phase(diagnostic, "update", 2.0)
    assert diagnostic.scalars["time/reward"] == 1.0
    assert diagnostic.scalars["perf/tokens_per_second/update"] == 0.0  # nothing was learned in its 2 seconds


def test_a_data_module_that_announces_no_phases_is_noticed():
    roles, diagnostic = started()
    with pytest.raises(ValueError, match=r"saw no rollout phase.*; give RolloutDataModule callbacks="):
        diagnostic.on_rollout_end(make_datamodule(roles).collect())


@pytest.mark.gpu
def test_a_gpu_tells_what_it_has_allocated_and_computes_the_same():
    plain = trained([], accelerator="cuda")
    measured = trained([Performance(peak_flops=1e12)], accelerator="cuda")
    assert_same_training(plain, measured)
    row = measured[0][1]
    for phase in ("rollout", "score", "reward", "update"):
        assert row[f"memory/{phase}/peak"] >= row[f"memory/{phase}/allocated"] > 0
    assert row["memory/update/peak"] > row["memory/update/allocated"]
    assert 0 < row["perf/mfu/update"] < 1
