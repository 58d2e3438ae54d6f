"""Names in prose are names in the code: keys, options of groups, and the names of TRL and verl."""

import re
import runpy

import pytest

from lit_rlkv.config.composing import groups, options_of
from lit_rlkv.config.keys import TABLES, foreign_rows
from lit_rlkv.kvcache import POLICIES
from tests.docs.pages import PAGES, ROOT

GROUPS = {*groups()}
KEYS = set(re.findall(r"`([\w.]+)`", PAGES["docs/reference/config.md"]))
NODES = GROUPS | {key.partition(".")[0] for key in KEYS if "." in key} - {"lit_rlkv", "torch"}
PROSE = [page for page in PAGES if not page.startswith("docs/reference/")]
THEIRS = {name for table in TABLES for theirs, _, _ in foreign_rows(table) for name in theirs}
FREE = ("cache.policy_options.", "reward.functions.")
"""Nodes with names that the user chooses."""
LISTS_OF_POLICIES = {
    "README.md": r"^- \*\*Eviction policies\*\*.*$",
    "docs/concepts/evicting-cache.md": r"^\| policy \| keeps the keys \|.*?\n\n",
    "docs/how-to/inside-trl.md": r"^\| kvpress \| `policy` \|.*?\n\n",
    "notebooks/02_anatomy_of_a_shadow_mask.ipynb": r"the last four are protected\..*?How many",
}
"""Lists that name every policy; the notebook's are those without training."""


@pytest.mark.parametrize(("page", "key"), [("config", "algorithm.kl.weight"), ("commands", "evaluate.ckpt")])
def test_every_key_has_an_anchor_of_its_own(page, key):
    text = PAGES[f"docs/reference/{page}.md"]
    ids = re.findall(r'^[|-] <a id="([^"]+)" href="#\1">', text, re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    assert key in ids
    assert len({*ids, *headings}) == len(ids) + len(headings)
    assert not re.search(r"^[|-] `[\w.]+`", text, re.M)


def unknown_names(text: str) -> list[str]:
    """Return what a text shows as `group=option` or `group.key`, and is neither."""
    found = []
    for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*(?:=[\w+.-]+)?)`", text):
        name, _, value = word.partition("=")
        is_key = name in KEYS | THEIRS or name.startswith(FREE) or is_file(name)
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


PAGES_OF_CODE = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["pages"]()


@pytest.mark.parametrize("path", PAGES_OF_CODE, ids=lambda path: path.name)
def test_the_pages_that_are_made_from_the_code_are_up_to_date(path):
    assert path.read_text(encoding="utf-8") == PAGES_OF_CODE[path], "run python scripts/reference.py"


@pytest.mark.parametrize("page", LISTS_OF_POLICIES)
def test_a_list_of_the_policies_has_all_of_them(page):
    flags = re.M | (0 if page == "README.md" else re.S)
    (found,) = re.findall(LISTS_OF_POLICIES[page], (ROOT / page).read_text(encoding="utf-8"), flags)
    left_out = {"learned"} if page.endswith(".ipynb") else set()
    assert {name for name in POLICIES if f"`{name}`" not in found} == left_out
