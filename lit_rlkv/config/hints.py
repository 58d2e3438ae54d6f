"""The key that was meant by one that does not exist."""

from collections.abc import Collection, Mapping
from difflib import SequenceMatcher, get_close_matches

from lit_rlkv.config.aliases import DIFFERENT, SAME

ALIKE, ALIKE_NAMES = 0.75, 0.6
"""Least similarity of two keys, and of their last names, because keys of one group begin alike."""
MAX_KEYS = 3
"""Most keys of one name that a hint lists."""


def hint(key: str, known: Collection[str], elsewhere: Mapping[str, str] | None = None) -> str | None:
    """Return what to write instead of an unknown key; None if that cannot be told.

    Args:
        known: keys of this config, also those that hold other keys.
        elsewhere: keys of options that are not chosen, with their option, such as `logger=wandb`.
    """
    elsewhere = elsewhere or {}
    if key in elsewhere:
        return f"{elsewhere[key]} has it"
    found = meant(key, {*known, *elsewhere})
    if not found:
        return explained(key, known) or _keys_of_group(key, known)
    options = {elsewhere[one] for one in found if one in elsewhere}
    of_option = f" of {options.pop()}" if len(options) == 1 else ""
    return f"did you mean {' or '.join(map(repr, found))}{of_option}?"


def meant(key: str, known: Collection[str]) -> list[str]:
    """Return the known keys that an unknown one may mean; none if it has a meaning that none of them has."""
    if (same := translated(key, known)) is not None:
        return [same]
    if explained(key, known) is not None:
        return []
    return _of_one_name(key, known) or spelt_alike(key, known)


def translated(key: str, known: Collection[str]) -> str | None:
    """Return the known key that has the meaning of an unknown one in another package, or ends it."""
    group = key.partition(".")[0]
    for end in _ends(key):
        same = SAME.get(end, end)
        # A group may have the setting for itself, as sft its optimizer.
        for candidate in _without_parents(key, (f"{group}.{same}", same, end)):
            if candidate in known:
                return candidate
        if end in DIFFERENT:
            return None
    return None


def explained(key: str, known: Collection[str]) -> str | None:
    """Return what to write instead of a key of another package, if no key means the same."""
    if "algorithm" not in known:
        return None  # the names are of training
    return next((DIFFERENT[end] for end in _ends(key) if end in DIFFERENT), None)


def spelt_alike(key: str, known: Collection[str]) -> list[str]:
    """Return the known keys that are spelt most like another; never one that this key lies below."""
    others = sorted(_without_parents(key, known))
    for close in get_close_matches(key, others, n=MAX_KEYS, cutoff=ALIKE):
        if SequenceMatcher(None, _name(key), _name(close)).ratio() >= ALIKE_NAMES:
            return [close]
    names = get_close_matches(_name(key), {_name(one) for one in others}, n=1, cutoff=ALIKE)
    return _of_one_name(names[0], others) if names else []


def _of_one_name(key: str, known: Collection[str]) -> list[str]:
    """Return the known keys with the last name of another, unless they are many."""
    found = sorted(one for one in _without_parents(key, known) if _name(one) == _name(key))
    return found if len(found) <= MAX_KEYS else []


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _ends(key: str) -> list[str]:
    """Return a key and its ends, such as `a.b.c`, `b.c` and `c`."""
    names = key.split(".")
    return [".".join(names[start:]) for start in range(len(names))]


def _without_parents(key: str, keys: Collection[str]) -> list[str]:
    return [one for one in keys if one != key and not key.startswith(f"{one}.")]


def _keys_of_group(key: str, known: Collection[str]) -> str | None:
    group = key.partition(".")[0]
    names = [one.removeprefix(f"{group}.") for one in known if one.startswith(f"{group}.")]
    plain = sorted(name for name in names if "." not in name and not name.startswith("_"))
    return f"{group} has the keys {', '.join(plain)}" if plain else None
