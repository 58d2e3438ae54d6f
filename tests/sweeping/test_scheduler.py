"""The loop over runs, with runs that are arithmetic in place of processes."""

import math
import os
import signal

import pytest
from rich.console import Console

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.job import FitJob, Outcome
from lit_rlkv.sweeping.scheduler import FitLauncher, Scheduler, interrupts_held
from lit_rlkv.sweeping.study import SweepStudy
from lit_rlkv.sweeping.sweep_file import n_runs
from tests.sweeping.files import BAYES, GRID, plan_of, with_parameters

N_VALUES = 9
"""Iterations of a run."""


class Computed(FitJob):
    """Logs the same value in every iteration, one with each look at it, and is done after the last."""

    def __init__(self, value, metric="reward", state="finished"):
        self.value, self.metric, self.state = value, metric, state
        self.n_done = 0
        self.was_stopped = self.was_awaited = False

    @property
    def is_running(self):
        self.n_done = min(self.n_done + 1, N_VALUES)
        return self.n_done < N_VALUES and not self.was_stopped

    def history(self, metric):
        return [self.value] * self.n_done

    def outcome(self, metric):
        state = "failed" if self.was_stopped else self.state
        metrics = {self.metric: self.value} if state == "finished" or self.was_stopped else {}
        return Outcome(state, metrics, self.history(metric), "" if state == "finished" else "out of memory")

    def ask_to_stop(self):
        self.was_stopped = True

    def wait(self):
        self.was_awaited = True


class Arithmetic(FitLauncher):
    """`make` turns a run's values into its job; runs that share a `kind` wait for one another."""

    def __init__(self, make, kind=None):
        self.make, self.kind = make, kind
        self.jobs, self.order, self.n_most = [], [], 0

    def launch(self, run):
        job = self.make(run.values)
        self.jobs.append(job)
        self.order.append(run.values)
        self.n_most = max(
            self.n_most, sum(job.n_done < N_VALUES and not job.was_stopped for job in self.jobs)
        )
        return job

    def must_wait(self, run, running):
        return self.kind is not None and self.kind(run) in [self.kind(other) for other in running]


def scheduler(folder, content, launcher, n_jobs=1, n=None):
    plan = plan_of(folder, content)
    study = SweepStudy(plan, folder / "sweep", n_runs(plan.sweep, n))
    return Scheduler(study, launcher, Console(quiet=True), n_jobs, poll_s=0.0)


@pytest.mark.parametrize("goal", ["maximize", "minimize"])
def test_bayes_learns_where_to_look(tmp_path, goal):
    content = with_parameters(BAYES, optimizer__lr=BAYES["parameters"]["optimizer.lr"])
    content |= {"run_cap": 18, "metric": {"name": "reward", "goal": goal}}
    launcher = Arithmetic(lambda run: Computed(math.log10(run["optimizer.lr"])))
    scheduler(tmp_path, content, launcher).run()
    found = [math.log10(values["optimizer.lr"]) for values in launcher.order]
    # The first ten are random in -5 to -1, so -3 on average; then it goes where the metric is better.
    first, last = sum(found[:10]) / 10, sum(found[10:]) / 8
    assert first == pytest.approx(-3, abs=0.6)
    assert last > first + 1 if goal == "maximize" else last < first - 1


def test_runs_go_side_by_side_and_no_more_than_asked(tmp_path):
    launcher = Arithmetic(lambda values: Computed(0.5, "eval/accuracy"))
    loop = scheduler(tmp_path, GRID, launcher, n_jobs=3)
    loop.run()
    assert launcher.n_most == 3
    assert len(loop.ended) == 4


def seeds(n, **more):
    content = with_parameters(GRID, seed={"values": list(range(n))})
    return content | {"metric": {"name": "reward", "goal": "maximize"}} | more


def test_hyperband_stops_the_runs_that_fall_behind(tmp_path):
    content = seeds(4, early_terminate={"type": "hyperband", "min_iter": 3, "eta": 3})
    values = {0: 0.5, 1: 0.4, 2: 0.5, 3: 0.9}
    loop = scheduler(tmp_path, content, Arithmetic(lambda run: Computed(values[run["seed"]])))
    loop.run()
    # One after the other, better first. At position 2 / 3 of 0.5, 0.4 stands 0.5; at 3 / 3 of 0.5, 0.5, 0.4
    # and at 4 / 3 of 0.9, 0.5, 0.5, 0.4 stands 0.5 too.
    assert [outcome.state for _, outcome in loop.ended] == ["finished", "stopped", "finished", "finished"]
    assert [len(outcome.history) for _, outcome in loop.ended] == [9, 3, 9, 9]
    assert loop.ended[1][1].reason == "behind at 3"


class Silent(Computed):
    """Fails before it has logged anything."""

    def history(self, metric):
        return []


def test_a_run_that_failed_and_is_tried_again_is_one_rival(tmp_path):
    content = seeds(2, early_terminate={"type": "hyperband", "min_iter": 3, "eta": 2})
    makers = {0: lambda: Computed(0.9, state="failed"), 1: lambda: Silent(0.5, state="failed")}
    scheduler(tmp_path, content, Arithmetic(lambda run: makers[run["seed"]]())).run()
    values = {0: 0.9, 1: 0.5}
    loop = scheduler(tmp_path, content, Arithmetic(lambda run: Computed(values[run["seed"]])), n_jobs=2)
    loop.run()
    # At position 2 / 2 of 0.9, 0.5 stands 0.5; at 3 / 2 of 0.9, 0.9, 0.5 would stand 0.9.
    assert [outcome.state for _, outcome in loop.ended] == ["finished", "finished"]


def test_without_hyperband_nobody_is_stopped(tmp_path):
    loop = scheduler(tmp_path, seeds(3), Arithmetic(lambda run: Computed(-float(run["seed"]))))
    loop.run()
    assert [outcome.state for _, outcome in loop.ended] == ["finished"] * 3


def test_no_run_starts_once_the_target_is_reached(tmp_path):
    content = seeds(6) | {"metric": {"name": "reward", "goal": "maximize", "target": 2}}
    loop = scheduler(tmp_path, content, Arithmetic(lambda run: Computed(float(run["seed"]))))
    loop.run()
    assert [run.values["seed"] for run, _ in loop.ended] == [0, 1, 2]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    launcher = Arithmetic(lambda run: Computed(0.5, state="failed" if run["seed"] == 1 else "finished"))
    loop = scheduler(tmp_path, seeds(3), launcher)
    loop.run()
    assert [outcome.state for _, outcome in loop.ended] == ["finished", "failed", "finished"]


def test_a_metric_that_no_run_logs_ends_the_sweep_after_the_first(tmp_path):
    launcher = Arithmetic(lambda run: Computed(0.5, "loss"))
    with pytest.raises(
        ConfigError, match="'reward' was not logged by run 0, which has finished; it logged loss"
    ):
        scheduler(tmp_path, seeds(3), launcher).run()
    assert len(launcher.jobs) == 1


def test_runs_that_would_repeat_work_wait_and_others_go_first(tmp_path):
    content = with_parameters(seeds(2), seed={"values": [0, 1]}, task__n_terms={"values": [3, 4]})
    launcher = Arithmetic(lambda run: Computed(0.5), kind=lambda run: run.values["seed"])
    scheduler(tmp_path, content, launcher, n_jobs=2).run()
    started = [(values["seed"], values["task.n_terms"]) for values in launcher.order]
    assert started[0] == (0, 3)
    assert started[1] == (1, 3)  # and (0, 4), which comes first, was held
    assert sorted(started) == [(0, 3), (0, 4), (1, 3), (1, 4)]


def test_an_interrupt_stops_what_runs_and_leaves_it_to_be_taken_up(tmp_path):
    class Interrupting(Computed):
        @property
        def is_running(self):
            if self.n_done == 4:
                raise KeyboardInterrupt
            return super().is_running

    launcher = Arithmetic(lambda run: Interrupting(0.5) if run["seed"] == 1 else Computed(0.5))
    with pytest.raises(KeyboardInterrupt):
        scheduler(tmp_path, seeds(3), launcher, n_jobs=2).run()
    assert all(job.was_stopped and job.was_awaited for job in launcher.jobs)
    again = Arithmetic(lambda run: Computed(0.5))
    scheduler(tmp_path, seeds(3), again).run()
    assert [values["seed"] for values in again.order] == [0, 1, 2]


def failing(*bad):
    return Arithmetic(lambda run: Computed(0.5, state="failed" if run["seed"] in bad else "finished"))


@pytest.mark.parametrize(("n_jobs", "n_tried"), [(1, 3), (5, 5)])
def test_a_sweep_whose_first_runs_all_fail_gives_up(tmp_path, n_jobs, n_tried):
    launcher = failing(*range(8))
    says = f"the first {n_tried} runs all failed, so the {8 - n_tried} others are not tried; see .*output.log"
    with pytest.raises(ConfigError, match=says):
        scheduler(tmp_path, seeds(8), launcher, n_jobs).run()
    assert n_tried <= len(launcher.jobs) <= n_tried + n_jobs


def test_one_that_does_not_fail_is_enough_to_go_on(tmp_path):
    loop = scheduler(tmp_path, seeds(8), failing(*range(1, 8)))
    loop.run()
    assert len(loop.ended) == 8
    # and later too, where those that failed come first
    again = scheduler(tmp_path, seeds(9), failing(*range(1, 8)))
    again.run()
    assert len(again.ended) == 9


def test_few_runs_that_all_fail_are_all_tried(tmp_path):
    loop = scheduler(tmp_path, seeds(3), failing(0, 1, 2))
    loop.run()
    assert [outcome.state for _, outcome in loop.ended] == ["failed"] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_waits_for_the_check_and_only_there_it_strikes(number):
    before = signal.getsignal(number)
    with interrupts_held() as check:
        check()
        os.kill(os.getpid(), number)
        reached = True
        with pytest.raises(KeyboardInterrupt):
            check()
    assert reached
    assert signal.getsignal(number) is before


def test_a_second_one_does_not_wait():
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
