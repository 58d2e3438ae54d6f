"""No logger can stop a run."""

import io

import pytest
from rich.console import Console

from lit_rlkv.reporting.loggers import GuardedLogger
from tests.reporting.loggers.recorded import KeepingLogger, place, start_in


def use(logger, tmp_path):
    """A run's way through its logger; returns what was printed."""
    console = Console(file=io.StringIO(), width=200)
    with GuardedLogger(logger, start_in(tmp_path), console) as guarded:
        guarded.send("an iteration", lambda to: to.scalars({"reward": 0.5}, place(1)))
        guarded.send("the outcome", lambda to: to.file(tmp_path, "report"))
    return console.file.getvalue()


def test_a_logger_gets_everything_and_says_what_the_user_should_know(tmp_path, caplog):
    logger = KeepingLogger()
    assert use(logger, tmp_path) == "look here\nupload it so\n"
    assert [call[0] for call in logger.calls] == ["open", "scalars", "file", "close"]
    assert logger.named("close") == [(True,)]
    assert not caplog.records
    assert use(None, tmp_path) == ""


@pytest.mark.parametrize(
    ("fails_at", "calls"),
    [
        ({"open"}, ["open", "close"]),
        ({"scalars"}, ["open", "scalars", "close"]),
        ({"file"}, ["open", "scalars", "file", "close"]),
        ({"close"}, ["open", "scalars", "file", "close"]),
        ({"scalars", "close"}, ["open", "scalars", "close"]),
    ],
)
def test_a_failure_anywhere_is_reported_once_and_ends_the_logger_alone(tmp_path, caplog, fails_at, calls):
    logger = KeepingLogger(fails_at=fails_at, figures_every=5)
    use(logger, tmp_path)
    assert [call[0] for call in logger.calls] == calls
    assert logger.named("close") == [(fails_at == {"close"},)]
    (warning,) = caplog.records
    assert "no space left on device" in warning.getMessage()
    assert "metrics.csv" in warning.getMessage()


def raising(error):
    def fail(logger):
        raise error

    return fail


def test_an_error_is_told_in_one_line_and_ends_the_figures(tmp_path, caplog):
    for error in (OSError("no\nspace"), TimeoutError()):
        guarded = GuardedLogger(KeepingLogger(figures_every=5), start_in(tmp_path), Console(quiet=True))
        assert guarded.figures_every == 5
        guarded.send("an iteration", raising(error))
        assert guarded.figures_every is None
    told = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert told == ["no space", "TimeoutError"]
    assert GuardedLogger(None, start_in(tmp_path), Console(quiet=True)).figures_every is None


@pytest.mark.parametrize(
    ("error", "work"),
    [
        (ZeroDivisionError, raising(ZeroDivisionError())),
        (KeyboardInterrupt, lambda guarded: guarded.send("an iteration", raising(KeyboardInterrupt()))),
    ],
)
def test_an_error_of_the_run_is_not_swallowed_and_ends_the_record_as_failed(tmp_path, error, work):
    logger = KeepingLogger()
    with pytest.raises(error), GuardedLogger(logger, start_in(tmp_path), Console(quiet=True)) as guarded:
        work(guarded)
    assert logger.named("close") == [(False,)]
