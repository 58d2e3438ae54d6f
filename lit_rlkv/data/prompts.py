"""The stream of problems: reproducible, split into train and eval, shared by the ranks, resumable."""

import hashlib
import json
import random
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from lit_rlkv.config.schema import CurriculumConfig
from lit_rlkv.data.curriculum import Curriculum
from lit_rlkv.rng import derive_seed, stream
from lit_rlkv.tasks.base import FiniteTask, Task, UserTask
from lit_rlkv.types import Problem, Prompt

_EVAL_ONE_IN = 10
_MAX_DRAWS = 1000


def split_of(prompt: Prompt) -> str:
    """Return "eval" for about one in ten prompts, else "train", whatever the task and seed."""
    text = prompt if isinstance(prompt, str) else json.dumps([message.as_dict() for message in prompt])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % _EVAL_ONE_IN == 0 else "train"


class PromptSource:
    """Problems of one split of a task, in an order fixed by the seed.

    The ranks share one global stream. A finite task is visited in a new order every epoch; any other task is
    sampled.

    Args:
        split: "train" or "eval".
        curriculum: with a decay, `take` draws problems of a finite task by their success rates.
    """

    def __init__(
        self,
        task: Task,
        *,
        split: str,
        seed: int,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        self.task = task
        self.split = split
        self.seed = seed
        self._cursor = 0
        self._digest = task.digest if isinstance(task, UserTask) else None
        self._members = _members(task, split) if isinstance(task, FiniteTask) else None
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self.size = None if self._members is None else len(self._members)
        """Number of problems in the split; None if it is endless."""
        self.curriculum: Curriculum | None = None
        """Success rates of the split's problems, equal on all ranks; None: problems come epoch by epoch."""
        if curriculum is not None and curriculum.decay is not None:
            prompts = [self._at(place).prompt for place in range(len(self._members or ()))]
            self.curriculum = Curriculum(prompts, curriculum.decay, curriculum.floor)

    def problem(self, index: int) -> Problem:
        """Return the problem at an index of the global stream, a function of seed, split and index alone."""
        if self.size is not None:
            epoch, place = divmod(index, self.size)
            return self._at(self._order(epoch)[place])
        rng = random.Random(derive_seed(self.seed, "problem", self.split, index))
        for _ in range(_MAX_DRAWS):
            problem = self.task.sample(rng)
            if split_of(problem.prompt) == self.split:
                return problem
        raise ValueError(
            f"{_MAX_DRAWS} draws from {self.task} gave no prompt of the {self.split} split: it has too few "
            "different ones; make it longer or harder"
        )

    def peek(self, n: int) -> list[Problem]:
        """Return the next `n` problems of all ranks together without taking them."""
        return [self.problem(index) for index in range(self._cursor, self._cursor + n)]

    def take(self, n: int) -> list[Problem]:
        """Take the next `n` problems."""
        return self.take_places(n, range(n))

    def take_places(self, n: int, places: Iterable[int]) -> list[Problem]:
        """Take the next `n` problems of all ranks together, and return those at some places among them."""
        start = self._cursor
        self._cursor += n
        if self.curriculum is not None:
            drawn = self.curriculum.draw(n, stream(self.seed, "curriculum", self.split, start))
            return [self._at(drawn[place]) for place in places]
        return [self.problem(start + place) for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor in the global stream, the digest of the rows, and rates; equal on all ranks."""
        rates = {} if self.curriculum is None else {"rates": self.curriculum.state_dict()}
        return {"cursor": self._cursor, "rows": self._digest, **rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved cursor, with any number of ranks."""
        if state["rows"] != self._digest:
            raise ValueError(
                f"the rows of {self.task} have changed since the run trained on them; restore them, or start "
                "a new run"
            )
        self._cursor = state["cursor"]
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["rates"])

    def _at(self, place: int) -> Problem:
        """Return the problem at a place of the split."""
        assert isinstance(self.task, FiniteTask)
        assert self._members is not None
        return self.task.at(self._members[place])

    def _shuffled(self, epoch: int) -> list[int]:
        assert self._members is not None
        rng = random.Random(derive_seed(self.seed, "epoch", self.split, epoch))
        return rng.sample(range(len(self._members)), len(self._members))


def _members(task: FiniteTask, split: str) -> list[int]:
    """Return the indices of a split: as the task says, or else by a hash of each prompt.

    Raises:
        ValueError: no problem falls into the split.
    """
    if isinstance(task, UserTask) and getattr(task, "is_divided", task.n_held_out > 0):
        n_train = len(task) - task.n_held_out
        return [*(range(n_train) if split == "train" else range(n_train, len(task)))]
    members = [index for index in range(len(task)) if split_of(task.at(index).prompt) == split]
    if not members:
        raise ValueError(
            f"none of the {len(task)} problems of {task} falls into the {split} split; add problems"
        )
    return members
