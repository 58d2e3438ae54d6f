"""The bar on a terminal, and the lines where there is none."""

import io
import re

import pytest
from rich.console import Console
from rich.errors import MarkupError

from lit_rlkv.reporting import progress
from lit_rlkv.reporting.progress import ProgressBar, say, track

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def plain():
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def lines(console):
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_without_a_terminal_there_is_a_line_for_every_tenth():
    console = plain()
    bar = ProgressBar(console=console)
    bar.on_fit_start(None, None)
    for iteration in range(1, 41):
        bar.on_iteration_end(iteration, 40, {"reward": 0.5, "tokens_per_second": 4100.4})
    bar.on_fit_end(None, None)
    assert [line.split()[1] for line in lines(console)] == [f"{n}/40" for n in range(4, 41, 4)]
    assert "reward 0.500 tokens/s 4,100" in lines(console)[0]
    assert "\x1b" not in console.file.getvalue()


def test_time_left_after_a_resume_counts_only_what_was_done_here(monkeypatch):
    console = plain()
    now = [100.0]
    bar = ProgressBar(console=console, first_iteration=7)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar.on_fit_start(None, None)
    for iteration in (8, 9):
        now[0] += 10.0
        bar.on_iteration_end(iteration, 10, {})
    # an iteration takes 10 s, one is left; to divide 20 s by nine would promise 2 s
    assert lines(console)[-1] == "iteration 9/10 0:00:20 0:00:10"


@pytest.mark.parametrize("ends", ["on_fit_end", "on_exception"])
def test_a_terminal_gets_a_bar_and_its_cursor_back(monkeypatch, ends):
    console = terminal(monkeypatch)
    bar = ProgressBar(console=console)
    bar.on_fit_start(None, None)
    for iteration in (1, 2):
        bar.on_iteration_end(iteration, 2, {"reward": 0.25, "tokens_per_second": 10.0})
    assert SHOW_CURSOR not in console.file.getvalue()
    getattr(bar, ends)(None, None, *[KeyboardInterrupt()] * (ends == "on_exception"))
    text = console.file.getvalue()
    assert "2/2" in text
    assert "reward 0.250" in text
    assert SHOW_CURSOR in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    bar.on_fit_end(None, None)  # a second time


def test_a_bar_has_its_total_before_the_first_iteration_ends_and_names_the_phase(monkeypatch):
    console = terminal(monkeypatch)
    bar = ProgressBar("iteration", console, n_iterations=40, first_iteration=8)
    bar.on_fit_start(None, None)
    bar.on_phase_progress("rollout", 0, 640)
    bar._meter._bars.refresh()
    bar.on_phase_progress("rollout", 64, 640)
    bar.on_exception(None, None, KeyboardInterrupt())
    assert "8/40" in console.file.getvalue()
    assert re.search(r"  rollout .* 0/640 tokens", console.file.getvalue())


def test_a_slow_iteration_has_plain_lines_of_its_phases(monkeypatch):
    console, now = plain(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = ProgressBar("iteration", console, n_iterations=40, first_iteration=20)  # of a resumed run
    bar.on_fit_start(None, None)
    for phase, n_total in (("rollout", 640), ("score", 64)):
        bar.on_phase_progress(phase, 0, n_total)
        for part in (1, 2, 3, 4):
            now[0] += 10
            bar.on_phase_progress(phase, part * n_total / 4, n_total)
    assert lines(console) == [
        "iteration 20/40 0:00:30 -:--:--",  # every 30 seconds
        "rollout 480/640 tokens 0:00:30 0:00:10",
        "iteration 20/40 0:01:00 -:--:--",
        "score 32/64 responses 0:00:20 0:00:20",
    ]


def test_a_part_of_a_unit_counts_as_a_fraction_until_the_unit_ends(monkeypatch):
    console, now = plain(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with track("eval", 2, console) as advance:
        for n_tokens in (30, 60, 90):
            now[0] += 15.0
            advance.within(n_tokens, 200)
        advance(accuracy=0.5)
    assert lines(console) == ["eval 0/2 0:00:30 0:01:18", "eval 1/2 accuracy 0.5 0:00:45 0:00:36"]


def test_a_failure_inside_tracked_work_gives_the_terminal_back(monkeypatch):
    console = terminal(monkeypatch)

    def fail():
        with track("warm-up", 5, console) as advance:
            advance(1)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert console.file.getvalue().endswith(SHOW_CURSOR)


def test_brackets_and_colons_of_users_are_no_markup():
    file = io.StringIO()
    say(Console(file=file, width=20), "after a[/b]c/:smile:/" + "long" * 9, stage="eval")
    assert file.getvalue() == "eval after a[/b]c/:smile:/" + "long" * 9 + "\n"
    with pytest.raises(MarkupError):  # the control
        Console(file=file).print("a[/b]c")


@pytest.mark.parametrize("make", [lambda _: plain(), terminal])
def test_a_task_that_is_mostly_short_shows_nothing_until_it_takes_longer(monkeypatch, make):
    console, now = make(monkeypatch), [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with track("check", 40, console, quiet_s=2.0) as advance:
        for _ in range(20):
            now[0] += 0.25
            advance()
            assert (console.file.getvalue() == "") is (now[0] < 102)
        advance(20)
    assert "40/40" in console.file.getvalue()
