"""Random user's rewards: each answer is a score or a counted failure, and nothing hangs or is left behind."""

import math
import os
import time
import uuid
from pathlib import Path

from hypothesis import strategies as st

from lit_rlkv.rewards import PythonFunction, RewardManager
from lit_rlkv.rewards.graders import MAX_ERROR_LENGTH
from lit_rlkv.rewards.verifier import MAX_SCORE
from lit_rlkv.types import Problem
from tests.fuzz import reward_actions
from tests.fuzz.harness import cases, outcome_of, run_cases

FILE = Path(reward_actions.__file__)
TIMEOUT_S = 2.0
MARK = "LIT_RLKV_FUZZ"
KINDS = {
    "good": sorted(reward_actions.GOOD),
    "returned": sorted(reward_actions.RETURNED),
    "raised": sorted(reward_actions.RAISED),
    "dying": sorted(reward_actions.DYING),
    "spoiling": sorted(reward_actions.SPOILING),
}
one_action = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.sampled_from(KINDS[kind]))
actions = st.lists(
    st.tuples(one_action, st.sampled_from(["", "x", "\ud800", "y" * 200_000])).map("|".join),
    min_size=1,
    max_size=5,
)
hanging = st.sampled_from([None] * 12 + sorted(reward_actions.HANGING))


def left_behind(mark: str) -> list[int]:
    """Return the processes of this case that are alive, without this one."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                is_ours = mark.encode() in (path / "environ").read_bytes()
                is_alive = (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                continue
            if is_ours and is_alive:
                found.append(int(path.name))
    return found


def answers_to(completions: list[str], n_workers: int) -> tuple[list[float], dict[str, str], list[int]]:
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    options = {"timeout_s": TIMEOUT_S, "n_workers": n_workers}
    function = PythonFunction(path=f"{FILE}:score", **options)
    with RewardManager({"user": function}) as manager:
        problems = [Problem("?", "", "")] * len(completions)
        found = manager.ask(problems, completions).collect()
    ends_at = time.monotonic() + 2
    while (left := left_behind(mark)) and time.monotonic() < ends_at:
        time.sleep(0.02)
    return found.scores["user"].tolist(), found.errors, left


def check(completions: list[str], hangs: str | None, n_workers: int) -> None:
    completions = [*completions, hangs] if hangs else completions
    found = outcome_of(lambda: answers_to(completions, n_workers), limit_s=20)
    found.check_one_line()
    scores, errors, left = found.value
    assert left == []
    names = [completion.partition("|")[0] for completion in completions]
    is_spoiled = not set(names).isdisjoint(reward_actions.SPOILING)
    for name, score in zip(names, scores, strict=True):
        assert math.isnan(score) or abs(score) <= MAX_SCORE
        if name in reward_actions.EXPECTED:
            assert score == reward_actions.EXPECTED[name] or (is_spoiled and math.isnan(score)), name
        elif name not in reward_actions.GOOD and name not in reward_actions.SPOILING:
            assert math.isnan(score), name
    assert set(errors) == ({"user"} if any(map(math.isnan, scores)) else set())
    for error in errors.values():
        assert 0 < len(error) <= MAX_ERROR_LENGTH
        assert error.isprintable()


@cases(6, 60)
def test_bad_rewards_fail_alone(n_cases):
    run_cases(
        n_cases,
        check,
        completions=actions,
        hangs=hanging,
        n_workers=st.integers(1, 3),
    )


def test_every_action_alone_is_tried_in_one_worker():
    """All kinds that do not hang, in one batch of one process after the other."""
    names = [name for kind in ("good", "returned", "raised", "dying") for name in KINDS[kind]]
    check(names, None, 2)
