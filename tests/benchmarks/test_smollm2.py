"""Rows of runs of recipe=smollm2: read from the folder of a finished run, run once, and told."""

import json

import fit_process
import pytest
import record
import smollm2

RESULT = {"cache": "dense", "accuracy": 0.5, "n_problems": 64}


def write_run(folder, *, finished=True):
    folder.mkdir(parents=True)
    after = [{**RESULT, "accuracy": 0.75}, {**RESULT, "cache": "random 32+6", "accuracy": 0.5}]
    before = [RESULT, {**RESULT, "cache": "random 32+6", "accuracy": 0.25}]
    results = {"before": before, "after": after if finished else [], "stage_seconds": {"rl": 120.0}}
    (folder / "evaluation.json").write_text(json.dumps(results))
    (folder / "metrics.csv").write_text("reward,smd/kl,kv/replay_gap\n0.1,0.5,1e-5\n0.2,0.25,3e-5\n")
    lines = [
        {"prompt": "1+2=", "completion": "1,3", "reward": 1.0, "iteration": iteration, "answer": "3"}
        for iteration in (1, 10, 30)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The overrides of the runs that were started; each finishes at once."""
    calls = []

    def fit(folder, runs_dir, overrides, n_threads):
        assert n_threads is None  # as for a user
        calls.append(overrides)
        write_run(folder)

    monkeypatch.setattr(fit_process, "fit", fit)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    return calls


def test_a_seed_is_run_once_and_a_finished_folder_is_taken_as_it_is(tmp_path, started):
    write_run(tmp_path / "smollm2" / "seed0")
    write_run(tmp_path / "cut", finished=False)
    assert not smollm2.is_finished(tmp_path / "cut")
    rows = [smollm2.run(seed, tmp_path) for seed in (0, 1)]
    assert [[word for word in call if word.startswith("seed")] for call in started] == [["seed=1"]]
    assert rows[0]["before"] == {"dense": 0.5, "sparse": 0.25}
    assert rows[0]["after"] == {"dense": 0.75, "sparse": 0.5}
    assert rows[0]["rewards"] == [0.1, 0.2]
    assert rows[0]["smd_kl"] == [0.5, 0.25]
    assert rows[0]["replay_gap"] == 3e-5
    sample = {"prompt": "1+2=", "completion": "1,3", "answer": "3", "reward": 1.0}
    assert rows[0]["samples"] == {"first": [sample], "last": [sample]}
    assert [row["seed"] for row in record.rows("smollm2")] == [0, 1]


def test_the_table_has_wilson_intervals_and_the_gain_in_points(tmp_path, started):
    smollm2.run(2, tmp_path)
    line = smollm2.report(record.rows("smollm2")).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "2", "25.0 (16–37)", "50.0 (38–62)", "+25.0", "50.0 (38–62)", "75.0 (63–84)", "2",
    ]  # fmt: skip
