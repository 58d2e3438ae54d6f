"""Every link of a page leads somewhere: a file of the repository, a page, a heading."""

import re
from pathlib import PurePosixPath
from posixpath import normpath

import pytest

from tests.docs.pages import PAGES, ROOT, without_code

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and the site make of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.M)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | {*re.findall(r'<a id="([^"]+)"', text)}


def broken_links(page: str, text: str) -> list[str]:
    """Return the links of a page to files or headings that do not exist."""
    broken = []
    for path, anchor in LINK.findall(without_code(text)):
        target = normpath(PurePosixPath(page).parent / path) if path else page
        known = PAGES | {page: text}
        is_there = (ROOT / target).exists() or target in known
        if not is_there or (anchor and target in known and anchor not in anchors(known[target])):
            broken.append(f"{path}#{anchor}" if anchor else path)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_or_a_heading(page):
    assert broken_links(page, PAGES[page]) == []


def test_every_page_of_the_site_is_in_its_navigation():
    listed = re.findall(r"^ +- (?:[^:]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(page.removeprefix("docs/") for page in PAGES if page.startswith("docs/"))
