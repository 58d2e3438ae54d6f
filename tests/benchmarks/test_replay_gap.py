from pathlib import Path

import pytest
import record
import replay_gap
import torch
from rollout_parts.setting import Setting

from tests.gguf_files import write_gguf

TOY = Setting("tiny", "h2o", batch=2, new=32, rounds=1, device=torch.device("cpu"), dtype=torch.float32)


def test_the_gap_is_rounding_and_a_dense_learners_is_not():
    row = replay_gap.measure(TOY, TOY.cache(16), "auto")
    assert row["n_tokens"] == 2 * 32
    assert 0 <= row["gap"]["mean"] <= row["gap"]["p99"] <= row["gap"]["max"] < 1e-4
    assert 0 <= row["no_eviction"]["mean"] < 1e-4
    assert row["dense_learner"]["mean"] > 1e-3


def test_evictions_of_another_column_show_in_the_gap(monkeypatch: pytest.MonkeyPatch):
    roll_out = Setting.roll_out

    def wrong(setting: Setting, *args: object, **options: object):
        found = roll_out(setting, *args, **options)
        return found.with_record(evicted_at=found.evicted_at.roll(1, dims=3))

    # Not of another layer: attention of random weights is so even that h2o evicts the same keys in all.
    monkeypatch.setattr(Setting, "roll_out", wrong)
    assert replay_gap.measure(TOY, TOY.cache(16), "auto")["gap"]["max"] > 1e-3


def test_a_pretrained_model_is_measured_once_on_text(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(replay_gap.tempfile, "gettempdir", lambda: str(tmp_path))
    write_gguf(tmp_path / "small.gguf")
    sizes = ["--preset", "tiny", "--batch", "2", "--new", "24", "--budget", "16"]
    asked = ["replay_gap.py", "--device", "cpu", "--record", *sizes, "--model", str(tmp_path / "small.gguf")]
    for rest in (["--dtypes", "float32"], ["--minutes", "0"]):
        monkeypatch.setattr("sys.argv", [*asked, *rest])
        replay_gap.main()
    (row,) = record.rows("replay_gap")
    assert (row["model"], row["dtype"]) == ("small", "float32")
    assert row["gap"]["max"] < 1e-4
    assert "small, bfloat16, h2o: no time left" in capsys.readouterr().out
