"""Looking up several keys in a long list of pairs: the task that a cache which forgets cannot do."""

import random
from dataclasses import dataclass

from lit_rlkv.tasks.base import names
from lit_rlkv.types import Problem, prompt_text


@dataclass(frozen=True)
class Recall:
    """`a4;k7;c1;k?a?` is solved by `k7;a4`: each pair asked for, in the order of the questions.

    A value follows its key at once: with a sign between them a small model trained from scratch did not learn
    to look a key up in any of the SFT settings tried (notebooks/LOG.md).

    Raises:
        ValueError: values without digits, no question, or more questions than pairs.
    """

    is_verifiable = True
    n_pairs: int = 6
    """Length: how many pairs are listed."""
    n_queries: int = 6
    """Difficulty: how many of them are asked for."""
    value_digits: int = 1
    """Digits of every value; leading zeros are kept."""

    def __post_init__(self) -> None:
        if self.value_digits < 1:
            raise ValueError(f"value_digits={self.value_digits} leaves no value to recall; give at least 1")
        if not 1 <= self.n_queries <= self.n_pairs:
            raise ValueError(
                f"n_queries={self.n_queries} is not between 1 and n_pairs={self.n_pairs}, but no pair is "
                "asked for twice; lower n_queries or raise n_pairs"
            )

    def sample(self, rng: random.Random) -> Problem:
        """New pairs with distinct keys, and distinct questions about them."""
        keys = rng.sample(names(self.n_pairs), self.n_pairs)
        pairs = {key: self._value(rng) for key in keys}
        asked = rng.sample(keys, self.n_queries)
        listing = "".join(f"{key}{value};" for key, value in pairs.items())
        answer = ";".join(f"{key}{pairs[key]}" for key in asked)
        return Problem(listing + "".join(f"{key}?" for key in asked), answer, answer)

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if every pair asked for is given, in order, and nothing else."""
        return float(completion == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """The answer with one value taken from another pair listed, or invented if all pairs agree."""
        listed = [entry[-self.value_digits :] for entry in prompt_text(problem.prompt).split(";")[:-1]]
        entries = problem.answer.split(";")
        place = rng.randrange(len(entries))
        key, value = entries[place][: -self.value_digits], entries[place][-self.value_digits :]
        others = [other for other in listed if other != value]
        wrong = rng.choice(others) if others else _another_value(value, rng)
        return ";".join([*entries[:place], f"{key}{wrong}", *entries[place + 1 :]])

    def _value(self, rng: random.Random) -> str:
        return f"{rng.randrange(10**self.value_digits):0{self.value_digits}d}"


def _another_value(value: str, rng: random.Random) -> str:
    n_values = 10 ** len(value)
    shifted = (int(value) + rng.randrange(1, n_values)) % n_values
    return f"{shifted:0{len(value)}d}"
