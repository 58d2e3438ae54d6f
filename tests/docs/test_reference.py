"""Names in prose are names in the code: keys, options of groups, and the names of TRL and verl."""

import re
import runpy

import pytest

from lit_rlkv.config.composing import CONF_DIR, TRL_VERL_ALIASES, options_of
from tests.docs.pages import PAGES, ROOT

GROUPS = {path.name for path in CONF_DIR.iterdir() if path.is_dir()}
KEYS = set(re.findall(r"`([\w.]+)`", PAGES["docs/reference/config.md"]))
NODES = GROUPS | {key.partition(".")[0] for key in KEYS if "." in key} - {"lit_rlkv"}
PROSE = [page for page in PAGES if not page.startswith("docs/reference/")]
FREE = ("cache.policy_options.", "reward.functions.")
"""Nodes with names that the user chooses."""


def unknown_names(text: str) -> list[str]:
    """Return what a text shows as `group=option` or `group.key`, and is neither."""
    found = []
    for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*(?:=[\w+.-]+)?)`", text):
        name, _, value = word.partition("=")
        is_key = name in (*KEYS, *TRL_VERL_ALIASES) or name.startswith(FREE) or is_file(name)
        is_option = name not in GROUPS or value in ("", "...", "NAME", "null", *options_of(name))
        if (name.partition(".")[0] in NODES and "." in name and not is_key) or not is_option:
            found.append(word)
    return found


def is_file(name: str) -> bool:
    return name.endswith((".md", ".py", ".yaml", ".csv", ".json", ".jsonl"))


@pytest.mark.parametrize("page", PROSE)
def test_every_key_and_option_that_a_page_names_exists(page):
    text = PAGES[page]
    if page == "docs/how-to/from-verl.md":  # the first column has verl's keys
        text = re.sub(r"^\| [^|]+\|", "|", text, flags=re.M)
    assert unknown_names(text) == []


def test_a_key_and_an_option_that_do_not_exist_are_found():
    text = "`cache.budget` `cache.buget=3` `task=sorting` `task=sortin` `optimizer.lr` `notes`"
    assert unknown_names(text) == ["cache.buget=3", "task=sortin"]


@pytest.mark.parametrize("alias", TRL_VERL_ALIASES)
def test_the_tables_of_trl_and_verl_agree_with_the_hints_of_the_command_line(alias):
    texts = PAGES["docs/how-to/from-trl.md"] + PAGES["docs/how-to/from-verl.md"]
    rows = [line.split("|") for line in texts.splitlines() if line.startswith("| `")]
    named = [cells[2] for cells in rows if re.search(rf"[`.]{re.escape(alias)}`", cells[1])]
    assert any(f"`{TRL_VERL_ALIASES[alias]}`" in cell for cell in named)


def test_the_page_of_commands_is_up_to_date():
    made = runpy.run_path(str(ROOT / "scripts" / "command_reference.py"))["page"]()
    assert made == PAGES["docs/reference/commands.md"], "run python scripts/command_reference.py"
