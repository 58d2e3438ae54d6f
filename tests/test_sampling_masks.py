"""Sampling masks in whole runs."""

import json

import pytest

from lit_rlkv.reporting.run_folder import read_metrics
from tests.whole_runs import config, run


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["experiment=smd"],
        ["algorithm=ppo", "diagnostics.mismatch.every=1", "diagnostics.layers.every=1"],
        ["algorithm=online_dpo"],
        ["experiment=tis", "correction.replays=true", "correction.bypass_mode=false"],
        ["algorithm.n_epochs=2", "algorithm.n_minibatches=2", "diagnostics.gradient.every=1"],
        ["roles=full", "rollout.min_p=0.05"],
    ],
    ids=str,
)
def test_what_top_k_and_top_p_leave_is_replayed_in_a_whole_run(tmp_path, share_sft_model, options):
    share_sft_model(config(tmp_path))
    run(tmp_path, "run", "rollout.top_p=0.9", "rollout.top_k=20", *options)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["kv/replay_gap"] < 1e-4
        assert row["kv/recorded_bytes/sampling_masks"] > 4
    after = json.loads((tmp_path / "run" / "evaluation.json").read_text())["after"]
    assert all(row["replay_gap"] < 1e-4 for row in after)
