"""Evaluations of a run: when one that is asked to end does."""

import signal
from types import SimpleNamespace

import pytest

from lit_rlkv.interrupts import InterruptedRunError, Interruption
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.run import Run
from lit_rlkv.stages import evaluation
from lit_rlkv.stages.evaluation import evaluate_before_training, evaluate_policy, report_on_reward
from lit_rlkv.stages.sft import run_sft
from lit_rlkv.tasks import ChainSum
from lit_rlkv.trust import trusting
from tests.environments.talkers import COUNTING
from tests.whole_runs import config


class AsksToEnd(ChainSum):
    """A task during whose scoring a signal comes."""

    def __init__(self, interruption):
        super().__init__()
        self.interruption, self.n_scored = interruption, 0

    def score(self, problem, completion):
        self.n_scored += 1
        self.interruption.signal = signal.SIGTERM
        return 1.0


def test_an_interrupted_evaluation_ends_after_the_current_cache(tmp_path):
    plain = Run(config(tmp_path, "stages=[sft,eval]"))
    roles = make_policy(plain, run_sft(plain, [])).roles
    own_task, interruption = plain.task, plain.interruption
    plain.task = task = AsksToEnd(interruption)
    with interruption.deferred(), pytest.raises(InterruptedRunError, match="SIGTERM"):
        evaluate_policy(plain, roles)
    assert task.n_scored == 16  # all prompts, with one cache of three
    plain.task, plain.interruption = own_task, Interruption()
    rows, rollout = evaluate_policy(plain, roles)
    assert len(rows) == 3
    assert rollout is not None


def test_results_from_before_a_setting_existed_are_those_of_its_default(tmp_path, monkeypatch):
    run = Run(config(tmp_path, "stages=[sft,rl,eval]"))
    rows: list[str] = []
    monkeypatch.setattr(run, "save_results", lambda: None)
    monkeypatch.setattr(evaluation, "report_on_reward", lambda *_: None)
    monkeypatch.setattr(evaluation, "evaluate_policy", lambda *_: (rows.append("again") or [*rows], None))
    module = SimpleNamespace(roles=None)
    evaluate_before_training(run, module, "none")
    assert rows == ["again"]
    del run.results.settings["perplexity"]
    evaluate_before_training(run, module, "none")
    assert rows == ["again"]
    run.results.settings["n_prompts"] += 1
    evaluate_before_training(run, module, "none")
    assert rows == ["again", "again"]


def test_an_environment_that_alone_gives_the_reward_gives_the_score(tmp_path):
    def accuracies(*overrides):
        with trusting(["tests"]):
            parts = Run(config(tmp_path, "stages=[sft,eval]", "sft.n_steps=5", *COUNTING, *overrides))
            rows, _ = evaluate_policy(parts, make_policy(parts, run_sft(parts, [])).roles)
        return [row.accuracy for row in rows]

    # Each response has at least its first turn, whose reward is 1.
    assert min(accuracies("reward.verifier=0")) == 1
    # The control: the verifier's score, of a model that has learned nothing.
    assert max(accuracies()) < 1


class WithoutSolutions(ChainSum):
    """Problems of which nothing but the prompt is known, as in a file of prompts."""

    def corrupt(self, problem, rng):
        raise ValueError("there are no solutions to corrupt")


def test_a_task_without_pairs_leaves_the_reward_head_unscored(tmp_path, caplog):
    parts = Run(config(tmp_path, "stages=[sft,eval]"))
    start = run_sft(parts, [])
    roles = make_policy(parts, start).roles
    assert report_on_reward(parts, roles, start) is not None
    assert not caplog.records
    parts.task = WithoutSolutions()
    assert report_on_reward(parts, roles, start) is None
    assert "is not scored: the task makes no pairs" in caplog.text
    assert "there are no solutions to corrupt" in caplog.text
