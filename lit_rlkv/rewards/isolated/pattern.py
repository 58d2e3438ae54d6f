"""Regular expressions as rewards. A pattern may take for ever: it is tried where it can be stopped."""

import re


def matches(completion: str, answer: str, pattern: str, group: int | str | None) -> float:
    """1.0 if the pattern is found, or where a group is named, if its last match is the answer."""
    if group is None:
        return float(re.search(pattern, completion) is not None)
    found = [match[group] for match in re.finditer(pattern, completion)]
    return float(bool(found) and found[-1] is not None and found[-1].strip() == answer.strip())
