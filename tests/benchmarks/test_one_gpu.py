"""one_gpu.py: the whole command at toy size, what a restart measures, and its page."""

import one_gpu
import pytest
import record
from one_gpu import cells, is_done, measure, parse
from one_gpu_parts.page import NAME, PAGE, latest, table, written
from time_limit import TimeLimit

HERE = dict.fromkeys(("device", "source", "torch", "triton", "transformers", "date", "commit"), "here")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)

    def main(*arguments: str) -> str:
        command = ["one_gpu.py", "--toy", "--folder", str(tmp_path / "models"), *arguments]
        monkeypatch.setattr("sys.argv", command)
        one_gpu.main()
        return capsys.readouterr().out

    return main


def test_a_cell_that_is_cut_off_has_an_estimate_and_is_measured_again(run, tmp_path):
    args = parse(["--toy", "--folder", str(tmp_path), "--methods", "shadow", "--bits", "16"])
    (key,) = cells(args)
    measure(args, key, TimeLimit(0), is_first=False)
    (row,) = record.rows(NAME)
    assert row["integrated"]
    assert row["tokens_per_s"] > 0
    assert "learner_s" not in row
    assert not is_done(row)
    assert is_done(row | {"is_first": True})  # no later command has more time for it
    assert "all cells are measured" in run("--methods", "shadow", "--bits", "16")
    assert not record.rows(NAME)[-1]["integrated"]


def test_a_model_path_is_of_one_shape():
    with pytest.raises(SystemExit):
        parse(["--page", "model.path=x"])
    assert parse(["--page", "model.path=x", "--shapes", "4b"]).overrides == ["model.path=x"]


def test_the_page_is_that_of_the_record():
    assert PAGE.read_text(encoding="utf-8") == written(record.rows(NAME))


def test_cells_show_figures_or_why_there_are_none():
    key = HERE | {"shape": "1.5b", "bits": 16, "overrides": [], "is_first": True}
    figures = {
        "integrated": False,
        "peak_mib": 2048.0,
        "n_iterations": 2,
        "rollout_s": 30.0,
        "learner_s": 10.0,
    }
    dense = key | figures | {"length": 2048, "method": "dense", "tokens_per_s": 1000.0}
    shadow = dense | {"method": "shadow", "tokens_per_s": 3000.0, "rollout_s": 10.0}
    cut = key | {
        "length": 8192,
        "method": "dense",
        "tokens_per_s": 500.0,
        "integrated": True,
        "peak_mib": 1024,
    }
    full = key | {"length": 32_768, "method": "dense", "reason": "no memory", "out_of_memory": True}
    rows = [dense | {"learner_s": 99.0}, dense, shadow, cut, full]
    lines = table(latest(rows), "1.5b").splitlines()
    assert "| 16 bit | `dense` | 1,000 · 10 s · 2.0 | ~500 · – · 1.0 | out of memory |" in lines
    assert "| 4 bit | `dense` | not run | not run | not run |" in lines
    # (30 + 10) / (10 + 10) = 2
    assert "| 1,000 → 3,000 tokens/s, 3.00 × | 2.00 × |" in written(rows)
