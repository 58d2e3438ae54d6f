import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lit_rlkv.reporting.logged_samples import LoggedSample
from lit_rlkv.reporting.loggers import GuardedLogger, LoggingCallback
from lit_rlkv.reporting.samples import Samples
from lit_rlkv.types import NEVER, Record, Rollout
from tests.reporting.loggers.recorded import KeepingLogger, place, start_in
from tests.reporting.test_samples import make_experience


def make(tmp_path, logger, history=(), draw=lambda rollout: ["a picture"], **sampling):
    quiet = Console(quiet=True)
    samples = Samples(tmp_path, console=quiet, **sampling)
    return LoggingCallback(GuardedLogger(logger, start_in(tmp_path), quiet), samples, list(history), draw)


def row(iteration):
    return {**place(iteration), "reward": iteration / 10}


def end(callback, iteration):
    callback.on_iteration_end(iteration, 9, {k: v for k, v in row(iteration).items() if k != "iteration"})


def write_samples(tmp_path, *iterations):
    lines = [json.dumps(vars(LoggedSample(f"p{i}", f"c{i}", 0.5, i))) for i in iterations]
    (tmp_path / "samples.jsonl").write_text("".join(line + "\n" for line in lines))


def experience(iteration, n_rows=20):
    """Return an experience with the fields that the callback reads."""
    attention_mask = torch.ones(n_rows, 3, dtype=torch.bool)
    zeros, record = torch.zeros(n_rows, 3), Record(torch.full((n_rows, 1, 1, 3), NEVER).int())
    rollout = Rollout(zeros.long(), attention_mask, attention_mask, zeros, record, 0)
    return SimpleNamespace(iteration=iteration, rollout=rollout)


def test_an_iteration_goes_to_the_logger_at_its_place(tmp_path):
    logger = KeepingLogger()
    end(make(tmp_path, logger), 4)
    ((metrics, at),) = logger.named("scalars")
    assert metrics["reward"] == 0.4
    assert at == place(4)


@pytest.mark.parametrize("n", [1, 16, 30])
def test_all_that_was_drawn_in_an_iteration_is_a_table(tmp_path, n):
    logger = KeepingLogger()
    callback = make(tmp_path, logger, n=n, every_n_iterations=2)
    for iteration in range(4):
        callback.samples.on_rollout_end(make_experience(iteration, n_prompts=n, group_size=1))
        end(callback, iteration + 1)
    rows = {i: [[i, f"question {j}", f"answer {j} of {i - 1}", j / 4] for j in range(n)] for i in (1, 3)}
    assert logger.named("table") == [("samples", rows[i], place(i)) for i in (1, 3)]


def test_rows_that_the_logger_holds_are_not_sent_again(tmp_path):
    logger = KeepingLogger(last_iteration=3)
    callback = make(tmp_path, logger, [row(1), row(2)])
    for iteration in (3, 4):
        end(callback, iteration)
    assert [at["iteration"] for _, at in logger.named("scalars")] == [4]


def test_rows_that_the_logger_lost_are_sent_again_after_a_resume(tmp_path):
    logger = KeepingLogger(last_iteration=1)
    callback = make(tmp_path, logger, [row(1), row(2), row(3)])
    end(callback, 4)
    assert [(metrics["reward"], at) for metrics, at in logger.named("scalars")] == [
        (0.2, place(2)),
        (0.3, place(3)),
        (0.4, place(4)),
    ]


@pytest.mark.parametrize(("last_iteration", "sent"), [(3, []), (1, [2, 3]), (0, [1, 2, 3])])
def test_the_logger_has_each_sample_once_after_a_resume(tmp_path, last_iteration, sent):
    write_samples(tmp_path, 1, 2, 3)
    logger = KeepingLogger(last_iteration=last_iteration)
    callback = make(tmp_path, logger, [row(1), row(2)], resumed_at=2)
    callback.samples.latest = [LoggedSample("p", "c", 1.0, 3)]
    end(callback, 3)
    assert [cells[0] for _, rows, _ in logger.named("table") for cells in rows] == sent


@pytest.mark.usefixtures("_as_users_run_it")
def test_figures_are_drawn_when_due_of_some_of_the_rollout(tmp_path):
    logger, drawn = KeepingLogger(figures_every=2), []

    def draw(rollout):
        drawn.append(len(rollout.input_ids))
        return ["a picture"]

    callback = make(tmp_path, logger, draw=draw)
    for iteration in (0, 1, 2):
        callback.on_rollout_end(experience(iteration))
        end(callback, iteration + 1)
    assert drawn == [16]
    assert logger.named("figures") == [(["a picture"], place(2))]


@pytest.mark.usefixtures("_as_users_run_it")
def test_a_rollout_is_let_go_of_before_the_next(tmp_path):
    callback = make(tmp_path, KeepingLogger(figures_every=1))
    callback.on_rollout_end(experience(0))
    assert callback._rollout is not None
    end(callback, 1)
    assert callback._rollout is None


@pytest.mark.usefixtures("_as_users_run_it")
def test_a_picture_that_fails_stops_no_training(tmp_path, caplog):
    callback = make(tmp_path, KeepingLogger(figures_every=1), draw=lambda rollout: 1 / 0)
    callback.on_rollout_end(experience(0))
    end(callback, 1)
    assert "division by zero" in caplog.text
