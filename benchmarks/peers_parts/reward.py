"""Reward of both trainers, in a file that imports neither."""


def share_of_digits(text: str) -> float:
    """Return the share of a text's characters that are digits; a model of random weights can learn it."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)
