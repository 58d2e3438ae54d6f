"""A run's process and its folder."""

import time

from omegaconf import OmegaConf

from lit_rlkv.config import composed
from lit_rlkv.reporting.run_metrics import read_metrics
from lit_rlkv.runs.resume import is_done
from lit_rlkv.sweeping import job
from lit_rlkv.sweeping.job import FitJob, can_resume, found_metrics, is_locked


def test_the_metrics_of_a_run_are_its_last_row_and_its_evaluation(tmp_path):
    assert found_metrics(tmp_path) == {}
    (tmp_path / "metrics.csv").write_text("iteration,reward\n1.0,0.5\n2.0,0.75\n")
    (tmp_path / "evaluation.json").write_text('{"final": {"eval/accuracy": 0.9}}')
    assert found_metrics(tmp_path) == {"iteration": 2.0, "reward": 0.75, "eval/accuracy": 0.9}


def test_a_run_is_done_by_its_report_and_no_other_file(tmp_path):
    (tmp_path / "evaluation.json").write_text('{"final": {}}')
    assert not is_done(tmp_path)
    (tmp_path / "metrics.csv").write_text("iteration,reward,kl\n1.0,0.5,0.2\n2.0,0.75,\n")
    (tmp_path / "output.log").write_text("first\nout of memory\n")
    failed = FitJob(tmp_path).outcome("reward")
    assert failed.state == "failed"
    assert failed.reason == f"ended\nfirst\nout of memory\nsee {tmp_path / 'output.log'}"
    (tmp_path / "report.html").write_text("<html>")
    saved = composed("config", ["debug=fast", "stages=[sft]", f"runs_dir={tmp_path}"])
    plain = OmegaConf.masked_copy(saved, [key for key in saved if key != "hydra"])
    OmegaConf.save(plain, tmp_path / "config.yaml", resolve=True)
    outcome = FitJob(tmp_path).outcome("kl")
    assert (outcome.state, outcome.history, outcome.metrics["kl"]) == ("finished", [0.2], 0.2)
    (tmp_path / "config.yaml").unlink()
    assert not can_resume(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0\n")  # fit looks for what there is, if only of an SFT stage
    assert can_resume(tmp_path)


def test_a_metrics_file_is_parsed_again_where_it_has_changed_only(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(job, "read_metrics", lambda path: parsed.append(path) or read_metrics(path))
    (tmp_path / "metrics.csv").write_text("iteration,reward\n1.0,0.5\n")
    run = FitJob(tmp_path)
    assert [run.history("reward") for _ in range(3)] == [[0.5]] * 3
    (tmp_path / "metrics.csv").write_text("iteration,reward\n1.0,0.5\n2.0,0.75\n")
    assert [run.history("reward") for _ in range(3)] == [[0.5, 0.75]] * 3
    assert len(parsed) == 2


def test_a_process_is_seen_joined_and_ended_by_another_sweep(tmp_path):
    assert not is_locked(tmp_path)
    job = FitJob.start(tmp_path, ["debug=fast", f"hydra.run.dir={tmp_path}"])
    assert job.is_running
    other = FitJob(tmp_path)
    assert other.is_running
    joined = FitJob.start(tmp_path, ["debug=fast", f"hydra.run.dir={tmp_path}"])  # starts nothing
    joined.ask_to_stop()
    joined.wait()
    assert not other.is_running
    assert not job.is_running
    assert "exit status -15" in job.outcome("reward").reason


def test_a_process_that_does_not_listen_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_rlkv.sweeping.job.GRACE_S", 0.0)
    job = FitJob.start(tmp_path, ["debug=fast", f"hydra.run.dir={tmp_path}"])
    started_at = time.monotonic()
    job.wait()
    assert "exit status -9" in job.outcome("reward").reason
    assert time.monotonic() - started_at < 5.0
