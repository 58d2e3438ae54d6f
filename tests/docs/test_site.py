"""The site leads from a page to files outside of docs/, which it does not hold, and includes such files."""

import tomllib

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.docs.pages import PAGES, ROOT

PAGE = """\
# Page

[a config](../../conf/x.yaml) ![a picture](../../data/x.png) [a page](other.md#other)
"""
FILES = {
    "docs/deep/page.md": PAGE,
    "docs/deep/other.md": '# Other\n\n## a.key_of\n\n## The key a.b\n\n--8<-- "notes/LOG.md"\n',
    "notes/LOG.md": "## A finding\n\n[a page](../docs/deep/page.md#page) [a row](rows.csv)\n",
    "notes/rows.csv": "1",
    "conf/x.yaml": "x: 1",
    "data/x.png": "a picture",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of two pages with links to the repository."""
    root = tmp_path_factory.mktemp("clone")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    build(
        load_config(
            str(ROOT / "mkdocs.yml"),
            docs_dir=str(root / "docs"),
            site_dir=str(root / "site"),
            nav=["deep/page.md", "deep/other.md"],
            extra_css=[],
            plugins=[],
            strict=True,
        )
    )
    return root / "site"


def test_the_addresses_of_the_site_are_those_of_the_package():
    config = load_config(str(ROOT / "mkdocs.yml"))
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert config.repo_url == urls["Repository"]
    assert config.site_url == f"{urls['Documentation']}/"


def html(site, page):
    return (site / "deep" / page / "index.html").read_text()


def test_a_link_to_a_file_of_the_repository_leads_to_the_repository(site):
    assert 'href="https://github.com/lit-rlkv/lit_rlkv/blob/main/conf/x.yaml"' in html(site, "page")


def test_a_picture_of_the_repository_is_copied_into_the_site(site):
    assert 'src="../../images/x.png"' in html(site, "page")
    assert (site / "images" / "x.png").read_text() == "a picture"


def test_a_link_to_another_page_stays_in_the_site(site):
    assert 'href="../other/#other"' in html(site, "page")


def test_an_included_file_keeps_its_headings_and_the_targets_of_its_links(site):
    text = html(site, "other")
    assert '<h2 id="a-finding">' in text
    assert 'href="../page/#page"' in text
    assert 'href="https://github.com/lit-rlkv/lit_rlkv/blob/main/notes/rows.csv"' in text


def test_a_heading_has_the_anchor_that_github_makes_and_a_key_keeps_its_dots(site):
    text = html(site, "other")
    assert '<h2 id="a.key_of">' in text
    assert '<h2 id="the-key-ab">' in text


def test_no_page_asks_an_api_for_the_stars_of_the_repository(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'data-md-component="source"' not in text
        assert 'class="md-source"' in text


def test_readme_stays_short_enough_to_be_read():
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 150
    assert len(text) <= 10_000
