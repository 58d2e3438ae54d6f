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


@pytest.mark.parametrize(
    ("fails_at", "calls"),
    [
        ("open", ["open", "close"]),
        ("scalars", ["open", "scalars", "close"]),
        ("file", ["open", "scalars", "file", "close"]),
        ("close", ["open", "scalars", "file", "close"]),
    ],
)
def test_a_failure_anywhere_is_reported_once_and_ends_the_logger_alone(tmp_path, caplog, fails_at, calls):
    logger = KeepingLogger(fails_at={fails_at})
    use(logger, tmp_path)
    assert [call[0] for call in logger.calls] == calls
    (warning,) = caplog.records
    assert "no space left on device" in warning.getMessage()
    assert "metrics.csv" in warning.getMessage()


def test_an_error_of_several_lines_or_none_is_one_line(tmp_path, caplog):
    for error in (OSError("no\nspace"), TimeoutError()):
        guarded = GuardedLogger(KeepingLogger(), start_in(tmp_path), Console(quiet=True))
        guarded.send("an iteration", _raising(error))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "no space",
        "TimeoutError",
    ]


def _raising(error):
    def fail(logger):
        raise error

    return fail


def test_a_logger_that_cannot_even_be_ended_is_reported_once(tmp_path, caplog):
    use(KeepingLogger(fails_at={"scalars", "close"}), tmp_path)
    assert len(caplog.records) == 1


def test_an_error_of_the_run_is_not_swallowed_and_ends_the_record_as_failed(tmp_path):
    logger = KeepingLogger()
    with pytest.raises(ZeroDivisionError), GuardedLogger(logger, start_in(tmp_path), Console(quiet=True)):
        _ = 1 / 0
    assert logger.named("close") == [(False,)]


def test_an_interrupt_during_logging_reaches_the_run(tmp_path):
    def interrupt(logger):
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        GuardedLogger(KeepingLogger(), start_in(tmp_path), Console(quiet=True)) as guarded,
    ):
        guarded.send("an iteration", interrupt)


def test_without_a_logger_nothing_is_sent(tmp_path):
    assert use(None, tmp_path) == ""


def test_no_figures_are_wanted_where_nothing_takes_them(tmp_path):
    logger = KeepingLogger(fails_at={"scalars"}, figures_every=5)
    guarded = GuardedLogger(logger, start_in(tmp_path), Console(quiet=True))
    assert guarded.figures_every == 5
    guarded.send("an iteration", lambda to: to.scalars({}, place(1)))
    assert guarded.figures_every is None
    assert GuardedLogger(None, start_in(tmp_path), Console(quiet=True)).figures_every is None
