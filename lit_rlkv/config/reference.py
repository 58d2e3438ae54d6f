"""The keys of each command line with their meanings, for docs/reference/config.md.

python -m lit_rlkv.config.reference > docs/reference/config.md
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, cast

from lit_rlkv.checks import MAX_NUMBER, MAX_WHOLE
from lit_rlkv.config.composing import CONF_DIR, SCHEMAS, groups, options_of
from lit_rlkv.config.options import Option, default_values, describe, keys_of, show


def reference_page() -> str:
    """Return docs/reference/config.md."""
    lines = [
        "# Config reference",
        "",
        "Every key of `python -m lit_rlkv.fit`. Set one on the command line by `key=value`;",
        "[Commands](commands.md) has the other programs.",
        "NaN and infinity are refused everywhere: where something can be switched off, `null` does it.",
        f"Without a bound of its own, a whole number is at most {MAX_WHOLE} in size, another {MAX_NUMBER:g}.",
        "Generated from `lit_rlkv/config/schema.py` and `conf/` by `python -m lit_rlkv.config.reference`.",
        "",
        "## Keys",
        "",
        *key_table(SCHEMAS["config"]),
    ]
    lines += ["", "## Options of the groups", "", "Choose one by `group=option`; then set its keys by name."]
    for group in groups():
        lines += ["", f"### {group} options", ""]
        for option in options_of(group):
            said = described(group, option)
            name = linked(f"{group}={option}")
            lines += [f"- {name}{said and ': '}{said}", *option_lines(group, option)]
    return "\n".join(lines) + "\n"


def key_table(schema: type, prefix: str = "", program: str = "") -> Iterator[str]:
    """Yield the keys of a schema as a table, and then those of the schemas below it.

    The anchor of a key is its name, after that of its program on a page with several.
    """
    yield from ("| key | default | value | meaning |", "|---|---|---|---|")
    below: list[tuple[str, type]] = []
    defaults = default_values(schema)
    for name, _, declared, kind in keys_of(schema):
        key = f"{prefix}{name}"
        if is_dataclass(kind):
            below.append((key, cast(type, kind)))
            continue
        cells = (linked(key, program), _default(defaults, name, declared), describe(kind, declared))
        # Bare, Markdown would read its underscores as emphasis.
        meaning = re.sub(r"\b_\w+_\b", r"`\g<0>`", declared.help)
        yield f"| {' | '.join(cell.replace('|', '/') for cell in (*cells, meaning))} |"
    for key, inner in below:
        yield from ("", f"### {key}", "", (inner.__doc__ or "").strip(), "")
        yield from key_table(inner, f"{key}.", program)


def linked(name: str, program: str = "") -> str:
    """Return a name as code that is an anchor and a link to itself."""
    anchor = f"{program}.{name}" if program else name
    return f'<a id="{anchor}" href="#{anchor}">`{name}`</a>'


def _default(defaults: dict[str, Any], name: str, declared: Option) -> str:
    if declared.is_chosen:
        return "by its group"
    value = defaults[name]
    if value == "???":
        return "must be given"
    return f"`{value['_target_']}`" if isinstance(value, dict) and value else f"`{show(value)}`"


def described(group: str, option: str) -> str:
    """Return what the first comment of an option's file says."""
    text = (CONF_DIR / group / f"{option}.yaml").read_text(encoding="utf-8")
    comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")]
    return " ".join(line for line in comments if not line.startswith(("@package", "python -m")))


def option_keys(group: str, option: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and comment of an option's file; a preset sets keys of other groups."""
    text = (CONF_DIR / group / f"{option}.yaml").read_text(encoding="utf-8")
    if "@package _global_" in text:
        return
    above: list[str] = []
    for line in text.splitlines():
        read = re.match(r"( *)(\w+):(?: +(?!#)(.*?))?(?: +# (.*))?$", line)
        if read is None or read[2] in ("defaults", "_partial_"):
            continue
        indent, name, value, comment = read.groups()
        above = [*above[: len(indent) // 2], name]
        if value or comment:
            yield ".".join([group, *above]), value or "", comment or ""


def option_lines(group: str, option: str) -> Iterator[str]:
    for key, value, comment in option_keys(group, option):
        given = f" = `{value}`" if value else ""
        yield f"    - `{key}`{given}{comment and ': '}{comment}"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
