"""Native tasks over lists: look keys up in a list of pairs, and sort numbers with a scratchpad."""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lit_rlkv.checks import Range
from lit_rlkv.tasks.base import MAX_LENGTH, MAX_STEPS, check_whole_numbers, lowercase_names
from lit_rlkv.types import Problem, prompt_text

_LISTS = re.compile(r"([0-9]+(,[0-9]+)*;)*[0-9]+(,[0-9]+)*")


@dataclass(frozen=True)
class Recall:
    """`a4;k7;c1;k?a?` is solved by `k7;a4`: each pair asked for, in the order of the questions.

    A cache that forgets cannot solve it. A value follows its key at once: with a sign between them a small
    model trained from scratch did not learn to look a key up in any of the SFT settings tried
    (notebooks/LOG.md).
    """

    is_verifiable = True
    n_pairs: int = 6
    """Length: how many pairs are listed."""
    n_queries: int = 6
    """Difficulty: how many of them are asked for."""
    value_digits: int = 1
    """Digits of every value; leading zeros are kept."""

    def __post_init__(self) -> None:
        length = Range(least=1, most=MAX_LENGTH)
        check_whole_numbers(
            self, n_pairs=length, n_queries=length, value_digits=Range(least=1, most=MAX_STEPS)
        )
        if self.n_queries > self.n_pairs:
            raise ValueError(
                f"n_queries must be at most n_pairs={self.n_pairs}, because no pair is asked for twice, got "
                f"{self.n_queries}"
            )

    def sample(self, rng: random.Random) -> Problem:
        """Return new pairs with distinct keys, and distinct questions about them."""
        keys = rng.sample(lowercase_names(self.n_pairs), self.n_pairs)
        n_values = 10**self.value_digits
        pairs = {key: f"{rng.randrange(n_values):0{self.value_digits}d}" for key in keys}
        asked = rng.sample(keys, self.n_queries)
        listing = "".join(f"{key}{value};" for key, value in pairs.items())
        answer = ";".join(f"{key}{pairs[key]}" for key in asked)
        return Problem(listing + "".join(f"{key}?" for key in asked), answer, answer)

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if every pair asked for is given, in order, and nothing else."""
        return float(completion == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """Return the answer with one value of another listed pair, or a new value if all values are equal."""
        listed = [entry[-self.value_digits :] for entry in prompt_text(problem.prompt).split(";")[:-1]]
        entries = problem.answer.split(";")
        place = rng.randrange(len(entries))
        key, value = entries[place][: -self.value_digits], entries[place][-self.value_digits :]
        others = [other for other in listed if other != value]
        if others:
            wrong = rng.choice(others)
        else:
            n_values = 10**self.value_digits
            wrong = f"{(int(value) + rng.randrange(1, n_values)) % n_values:0{self.value_digits}d}"
        return ";".join([*entries[:place], f"{key}{wrong}", *entries[place + 1 :]])


@dataclass(frozen=True)
class Sorting:
    """`5,2,9,1>` is solved by `1,5,2,9;1,2,5,9;1,2,5,9`: each list moves the next smallest number forward.

    Only the last list is scored.
    """

    is_verifiable = True
    n_items: int = 4
    """Length: how many numbers are sorted."""
    max_value: int = 9
    """Difficulty: numbers are drawn from 0 to this, with repetition."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, n_items=Range(least=2, most=MAX_STEPS), max_value=Range(least=1))

    def sample(self, rng: random.Random) -> Problem:
        numbers = [0]
        while len(set(numbers)) == 1:
            numbers = [rng.randint(0, self.max_value) for _ in range(self.n_items)]
        solution = _selections(numbers, [min] * (self.n_items - 1))
        return Problem(_join(numbers) + ">", solution, _join(sorted(numbers)))

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion is one or more lists of numbers and the last is the sorted one."""
        is_well_formed = _LISTS.fullmatch(completion) is not None
        return float(is_well_formed and completion.rpartition(";")[2] == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """Return the selections with the largest number taken for the smallest once, if they differ."""
        numbers = [int(number) for number in prompt_text(problem.prompt).removesuffix(">").split(",")]
        ranked = sorted(numbers)
        places = [place for place in range(len(numbers) - 1) if ranked[place] != ranked[-1]]
        mistaken = rng.choice(places)
        return _selections(numbers, [max if place == mistaken else min for place in range(len(numbers) - 1)])


def _selections(numbers: Sequence[int], choices: Iterable[Callable[[list[int]], int]]) -> str:
    done, rest, lists = [], list(numbers), []
    for choose in choices:
        done.append(choose(rest))
        rest.remove(done[-1])
        lists.append(_join([*done, *rest]))
    return ";".join(lists)


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
