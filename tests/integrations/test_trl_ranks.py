"""EvictingGRPOTrainer under accelerate's DDP, in two processes on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from tests.integrations.spelled import chat_model
from tests.integrations.trl_runs import save_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_train_as_trl_does_and_replay(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("trl_ranks.py"))
    chat_model(tmp_path / "chat")
    done = subprocess.run(
        [*command, script, save_model(tmp_path / "model"), str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["ours"]) == len(found["plain"]) == 3
    for row, expected in zip(found["ours"], found["plain"], strict=True):
        for name in ("loss", "grad_norm", "reward", "entropy"):
            assert row[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-3), name
    for name in ("evicting", "truncated", "lora", "tools"):
        assert all(row["kv/replay_gap"] < 1e-4 for row in found[name]["rows"])
    assert found["distilled"]["rows"][0]["kv/replay_gap"] > 0.1  # a dense learner
    assert found["tools"]["rows"][0]["tools/call_frequency"] == 5 / 8
    for name in ("evicting", "truncated", "distilled", "lora", "tools"):
        assert found[name]["difference"] == 0.0
