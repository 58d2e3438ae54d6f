"""What to write instead of a key that does not exist: the name of another package, or a misspelt key."""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import yaml

ALIKE = 0.75
"""Least similarity of a key, or of its last name, and the one that is meant."""
MAX_KEYS = 3
"""Most keys of one name that a hint lists."""
TOO_GENERAL = ("n", "path", "name", "lr", "rollout_correction")
"""Last names of keys of verl that mean nothing alone."""


def foreign_rows() -> dict[str, list[tuple[str, str, str]]]:
    """Return names of other packages, what to write here and a note, by package; in Markdown."""
    text = (Path(__file__).parent / "foreign_names.yaml").read_text(encoding="utf-8")
    return {package: [tuple(row) for row in rows] for package, rows in yaml.safe_load(text).items()}


@cache
def foreign_names() -> dict[str, str]:
    """Return what to write instead of each name of another package, also by the ends of a dotted name."""
    found: dict[str, list[str]] = {}
    for rows in foreign_rows().values():
        for names, ours, note in rows:
            said = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", ours or note).replace("`", "'")
            for name in re.findall(r"`\.?([\w.]+)", names):
                for end in _ends(name):
                    if end == name or end not in TOO_GENERAL:
                        found.setdefault(end, []).append(said)
    return {name: " or ".join(dict.fromkeys(said)) for name, said in found.items()}


def hint(key: str, known: Collection[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Return what to write instead of an unknown key; that `--help-all` lists all keys if nothing is alike.

    Args:
        known: keys of this config, also those that hold other keys.
        elsewhere: keys of options that are not chosen, with their option, such as `logger=wandb`.
    """
    elsewhere = elsewhere or {}
    if key in elsewhere:
        return f"{elsewhere[key]} has it"
    others = [one for one in known if not key.startswith(f"{one}.")]
    same = sorted(one for one in others if _name(one) == _name(key))
    group = key.partition(".")[0]
    found = [one for one in same if one.startswith(f"{group}.")] or same
    if not found and "algorithm" in known:  # the names of other packages are of training
        for end in _ends(key):
            if end in foreign_names():
                return f"write {foreign_names()[end]}"
    if not found or len(found) > MAX_KEYS:
        names = {_name(one): one for one in sorted({*others, *elsewhere}, reverse=True)}
        close = get_close_matches(key, {*others, *elsewhere}, n=1, cutoff=ALIKE)
        alike = get_close_matches(_name(key), names, n=1, cutoff=ALIKE)
        found = close if close and (alike or "." not in close[0]) else [names[one] for one in alike]
    if found:
        of_option = f" of {elsewhere[found[0]]}" if found[0] in elsewhere else ""
        return f"did you mean {' or '.join(map(repr, found))}{of_option}?"
    names_in = sorted(one.removeprefix(f"{group}.") for one in known if one.startswith(f"{group}."))
    plain = ", ".join(name for name in names_in if "." not in name and name[0] != "_")
    return f"{group} has the keys {plain}" if plain else "--help-all lists all keys"


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _ends(key: str) -> list[str]:
    """Return a key and its ends, such as `a.b.c`, `b.c` and `c`."""
    names = key.split(".")
    return [".".join(names[start:]) for start in range(len(names))]
