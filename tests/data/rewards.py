"""A reward function as a user writes one."""


def score(completion: str, answer: str) -> float:
    """Right, and a little less for every character too many."""
    return float(answer in completion) - 0.01 * max(len(completion) - len(answer), 0)


def has_one(completion: str) -> float:
    """Right often enough that some groups differ and some agree."""
    return float("1" in completion)
