"""Reward functions run beside the rollout and the scoring, and their answers do not depend on when."""

import logging
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.config.schema import RewardConfig
from lit_rlkv.distributed.ranks import SINGLE_PROCESS, ranks_of
from lit_rlkv.experience import sample
from lit_rlkv.rewards import PythonFunction
from lit_rlkv.rewards.manager import PendingRewards
from lit_rlkv.rollout import generate
from tests.experience.test_datamodule import of_functions
from tests.hand_built import make_datamodule, make_roles
from tests.rewards.helpers import InThreads, wait_until
from tests.tiers import slow

SOURCE = """
import time
import zlib

def score(completion):
    return zlib.crc32(completion.encode()) % 7

def hangs(completion):
    if zlib.crc32(completion.encode()) % 8 == 0:
        time.sleep(60)
    return len(completion)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(SOURCE)
    return path


def in_threads(file=None):
    return {
        "own": InThreads(ask=lambda question: zlib.crc32(question["completion"].encode()) % 7),
        "odd": InThreads(ask=says_what_it_cannot_score),
    }


def in_processes(file):
    return in_threads() | {
        "own": PythonFunction(path=f"{file}:score"),
        "hangs": PythonFunction(path=f"{file}:hangs", timeout_s=1.0, n_workers=4),
    }


def ask_at_the_end(monkeypatch):
    """Give the responses of a rollout only when it is over, in the order of their rows."""

    def late(*arguments, on_finished, **settings):
        rollout = generate(*arguments, **settings)
        on_finished(list(range(len(rollout.input_ids))), rollout.input_ids, rollout.response_mask)
        return rollout

    monkeypatch.setattr(sample, "generate", late)


def says_what_it_cannot_score(question):
    completion = question["completion"]
    if zlib.crc32(completion.encode()) % 5 == 0:
        raise ValueError(f"no score for {completion!r}")
    return zlib.crc32(completion.encode()) % 3


def two_iterations(functions, max_failed=1.0):
    """Return the data module and the experiences of two iterations."""
    data = make_datamodule(
        make_roles(),
        rollout={"n_shards": 2, "max_rows": 4},
        reward=RewardConfig(max_failed=max_failed, normalize="running"),
        functions=functions,
    )
    with data.rewards:
        found = [data.collect()]
        data.iteration += 1
        found.append(data.collect())
    return data, found


def bits(values):
    """Return a dict of lists in which a NaN equals itself."""
    return {name: value.float().view(torch.int32).tolist() for name, value in values.items()}


def results(data, experiences, caplog):
    """Return all that depends on rewards."""
    return (
        [experience.completions for experience in experiences],
        [bits(experience.rewards.components) for experience in experiences],
        [
            bits({name: getattr(experience.rewards, name) for name in ("total", "weighted", "is_failed")})
            for experience in experiences
        ],
        data.reward.state_dict(),
        [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING],
    )


@pytest.mark.parametrize("functions_of", [in_threads, slow(in_processes)])
def test_rewards_failures_and_moments_do_not_depend_on_when_rewards_are_asked(
    functions_of, file, monkeypatch, caplog
):
    functions = functions_of(file)
    places, add = [], PendingRewards.add

    def recorded(pending, rows, completions):
        places.extend(rows)
        add(pending, rows, completions)

    monkeypatch.setattr(PendingRewards, "add", recorded)
    early = results(*two_iterations(functions), caplog)
    order, rows = places.copy(), [*range(16)] * 2
    assert order != rows
    assert sorted(order) == sorted(rows)

    places.clear()
    caplog.clear()
    ask_at_the_end(monkeypatch)
    late = results(*two_iterations(functions), caplog)
    assert places == rows
    assert early == late
    failing = functions.keys() - {"own"}
    for name in failing:
        scores = torch.tensor([scores[name] for scores in early[1]], dtype=torch.int32).view(torch.float32)
        assert 0 < scores.isnan().sum() < 32
    assert len(early[-1]) == len(failing)  # one warning for each function that fails


def test_a_score_in_the_place_of_another_would_be_seen(monkeypatch, caplog):
    early = results(*two_iterations(in_threads()), caplog)
    add = PendingRewards.add

    def misplaced(pending, rows, completions):
        add(pending, [row ^ 1 for row in rows], completions)

    monkeypatch.setattr(PendingRewards, "add", misplaced)
    caplog.clear()
    assert results(*two_iterations(in_threads()), caplog) != early


def test_rewards_are_under_way_before_the_rollout_ends():
    is_asked = threading.Event()

    def on_progress(phase, n_done, n_total):
        if phase == "rollout" and n_done == n_total:
            assert is_asked.wait(20)  # asked after the rollout, this would never come

    data = make_datamodule(
        make_roles(), **of_functions(own=InThreads(ask=lambda question: is_asked.set() or 1))
    )
    data.callbacks = [SimpleNamespace(on_phase_progress=on_progress)]
    assert data.collect().rewards.total.tolist() == [1.0] * 16
    assert is_asked.is_set()


def sample_on_a_rank(fabric: Fabric, folder: Path) -> tuple[list[str], list[float]]:
    """Return completions and rewards; rank 1 starts to sample when a reward of rank 0 was asked."""
    ranks = ranks_of(fabric)

    def ask(question):
        (folder / str(ranks.rank)).touch()
        return zlib.crc32(question["completion"].encode()) % 7

    def late(*arguments, **settings):
        assert ranks.rank == 0 or wait_until((folder / "0").exists)
        return generate(*arguments, **settings)

    sample.generate = late  # this process ends with the function
    return sample_with(ranks, ask)


def sample_with(ranks, ask):
    data = make_datamodule(make_roles(), rollout={"n_shards": 2}, **of_functions(own=InThreads(ask=ask)))
    data.run.ranks = ranks
    with data.rewards:
        experience = data.collect()
    return experience.completions, experience.rewards.total.tolist()


def test_a_rank_asks_its_rewards_without_waiting_for_the_rollout_of_another(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    # The launcher returns what rank 0 has found.
    completions, rewards = fabric.launch(sample_on_a_rank, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}
    expected = sample_with(SINGLE_PROCESS, lambda question: zlib.crc32(question["completion"].encode()) % 7)
    assert (completions, rewards) == (expected[0][:8], expected[1][:8])
    assert len(set(rewards)) > 2


def test_rewards_are_under_way_while_the_roles_score():
    is_asked, is_scored = threading.Event(), threading.Event()

    def slow(question):
        is_asked.set()
        assert is_scored.wait(20)  # asked after the scoring, this would come first
        return len(question["completion"])

    def on_end(phase, iteration):
        if phase == "score":
            assert is_asked.wait(20)
            is_scored.set()

    data = make_datamodule(make_roles(), **of_functions(slow=InThreads(ask=slow)))
    data.callbacks = [SimpleNamespace(on_phase_end=on_end)]
    experience = data.collect()
    assert is_scored.is_set()
    assert experience.rewards.total.tolist() == [len(text) for text in experience.completions]
