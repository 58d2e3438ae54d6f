"""Properties of runs over hundreds of iterations."""

import gc
import statistics

import pytest
import torch

from lit_rlkv.callbacks.rollout_statistics import RolloutStatistics
from tests.whole_runs import rows_of, run

PERFORMANCE = "{_target_:lit_rlkv.callbacks.performance.Performance,every:1}"
MIB = 2**20


@pytest.mark.slow
def test_nothing_grows_over_200_iterations(tmp_path, monkeypatch):
    n_tensors = []

    class Counting(RolloutStatistics):
        def on_iteration_end(self, iteration, n_iterations, metrics):
            super().on_iteration_end(iteration, n_iterations, metrics)
            if iteration % 20 == 0:
                gc.collect()
                n_tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    monkeypatch.setattr("lit_rlkv.runs.outputs.RolloutStatistics", Counting)
    run(
        tmp_path, "long", "stages=[sft,rl]", "algorithm.n_iterations=200", "rollout.n_prompts=4",
        "diagnostics=none", f"+diagnostics.performance={PERFORMANCE}", "callbacks.samples_every=50",
    )  # fmt: skip
    assert len(n_tensors) == 10
    assert len(set(n_tensors[1:])) == 1  # one tensor kept an iteration would be 20 more each time
    resident = [float(row["memory/update/resident"]) for row in rows_of(tmp_path / "long")]
    early, late = statistics.median(resident[60:80]), statistics.median(resident[-20:])
    assert late - early < 8 * MIB
