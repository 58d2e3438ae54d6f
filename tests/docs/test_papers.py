"""The page of papers: it has each paper that the code names, and what it names exists."""

import re

import pytest

from lit_rlkv.config import composed
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "reference" / "papers.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "reference" / "config.md").read_text(encoding="utf-8")
PAPER = r"\b\d{4}\.\d{5}\b"
ONLY_FORMULAS = {"2205.05198"}
"""Papers whose memory formulas are quoted, and that no setting turns on."""
SECTIONS = re.split(r"^## ", PAGE, flags=re.M)[1:]
CODE = [
    one
    for section in SECTIONS
    for row in section.splitlines()
    if row[:1] == "|"
    for one in re.findall(r"`([^`]+)`", row)
]
SETTINGS = sorted(
    {
        one
        for one in CODE
        if re.fullmatch(r"[a-z_]+([.=][\w.=+]+)+", one) and "/" not in one and not one.endswith(".py")
    }
)


def test_each_paper_that_the_code_names_is_on_the_page():
    sources = [*(ROOT / "lit_rlkv").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    named = {
        one for path in sources for one in re.findall(f"arXiv:({PAPER})", path.read_text(encoding="utf-8"))
    }
    assert named - ONLY_FORMULAS <= {*re.findall(PAPER, PAGE)}


def test_files_and_names_exist():
    for section in SECTIONS:
        folder = re.search(r"place in `([\w/]+)`", section)
        assert folder is not None
        for row in section.splitlines():
            for path, name in re.findall(r"`([\w/]+\.py)`(?:: `(\w+)`)?", row if row[:1] == "|" else ""):
                file = ROOT / (path if path.startswith("tests/") else folder[1] + path)
                assert file.is_file(), path
                assert re.search(rf"^(def |class )?{name}\b", file.read_text(encoding="utf-8"), re.M), name


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_exist(setting):
    key, _, value = setting.partition("=")
    if value:
        composed(
            "config", ["model.path=x", setting, *(["distillation.model=x"] if value == "teacher" else [])]
        )
    assert f"`{key}`" in REFERENCE or f'id="{key}"' in REFERENCE or f'id="{setting}"' in REFERENCE
