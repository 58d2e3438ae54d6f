"""The stream of problems: reproducible, split into train and eval, shared out over ranks, resumable."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from lit_rlkv.rng import derive_seed
from lit_rlkv.tasks.base import FiniteTask, Task, UserTask
from lit_rlkv.types import Problem, Prompt

_EVAL_ONE_IN = 10
_MAX_DRAWS = 1000


def split_of(prompt: Prompt) -> str:
    """The split of a prompt whatever the task and seed: "eval" for about one in ten, else "train"."""
    text = prompt if isinstance(prompt, str) else json.dumps([asdict(message) for message in prompt])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % _EVAL_ONE_IN == 0 else "train"


class PromptSource:
    """Problems of one split of a task, in an order fixed by the seed.

    The ranks take turns in one global stream, so together they see what a single process would see. A finite
    task is walked through in a new order every epoch; any other task is sampled.

    Raises:
        ValueError: no such split or rank, or a finite task without problems in the split.
    """

    def __init__(self, task: Task, *, split: str, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split={split!r} does not exist; give 'train' or 'eval'")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not among the {world_size} ranks; give 0 to {world_size - 1}")
        self.task = task
        self.split = split
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._cursor = 0
        self._rows = task.digest if isinstance(task, UserTask) else None
        self.size: int | None = None
        """Different problems in the split; None where there is no end of them."""
        if isinstance(task, FiniteTask):
            members = _members(task, split)
            self.size = len(members)
            self._draw = _listed(task, split, seed, members)
        else:
            self._draw = _sampled(task, split, seed)

    def problem(self, index: int) -> Problem:
        """The problem at a place of the global stream, a function of seed, split and index alone."""
        return self._draw(index)

    def ahead(self, n: int) -> list[Problem]:
        """The next `n` problems of all ranks together, which stay to be taken."""
        return [self.problem(index) for index in range(self._cursor, self._cursor + n)]

    def take(self, n: int) -> list[Problem]:
        """This rank's next `n` problems; all ranks must take equally many."""
        start = self._cursor + self.rank
        self._cursor += n * self.world_size
        return [self.problem(index) for index in range(start, self._cursor, self.world_size)]

    def state_dict(self) -> dict[str, Any]:
        """The place reached in the global stream, the same on every rank, and the digest of its rows."""
        return {"cursor": self._cursor, "rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved place, with any number of ranks.

        Raises:
            ValueError: the rows of a user's data are others now, so that the place is one in another stream.
        """
        saved = state.get("rows")  # which older checkpoints do not have
        if saved is not None and saved != self._rows:
            raise ValueError(
                f"it was trained on other rows than those that {self.task} has now: they have changed since; "
                "bring them back, or start a new run"
            )
        self._cursor = state["cursor"]


def _sampled(task: Task, split: str, seed: int) -> Callable[[int], Problem]:
    """Draws that belong to the other split are drawn again."""

    def draw(index: int) -> Problem:
        rng = random.Random(derive_seed(seed, "problem", split, index))
        for _ in range(_MAX_DRAWS):
            problem = task.sample(rng)
            if split_of(problem.prompt) == split:
                return problem
        raise ValueError(
            f"{_MAX_DRAWS} draws from {task} gave no prompt of the {split} split: it has too few different "
            "ones; make it longer or harder"
        )

    return draw


def _members(task: FiniteTask, split: str) -> list[int]:
    """Places in the list that a split has: as the task says, or else by each prompt."""
    if isinstance(task, UserTask) and task.n_held_out:
        n_train = len(task) - task.n_held_out
        return [*(range(n_train) if split == "train" else range(n_train, len(task)))]
    members = [index for index in range(len(task)) if split_of(task.at(index).prompt) == split]
    if not members:
        raise ValueError(
            f"none of the {len(task)} problems of {task} falls into the {split} split; add problems"
        )
    return members


def _listed(task: FiniteTask, split: str, seed: int, members: list[int]) -> Callable[[int], Problem]:
    """Every problem of the split once per epoch, in an order of the epoch's own."""

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return random.Random(derive_seed(seed, "epoch", split, epoch)).sample(members, len(members))

    def draw(index: int) -> Problem:
        epoch, place = divmod(index, len(members))
        return task.at(order(epoch)[place])

    return draw
