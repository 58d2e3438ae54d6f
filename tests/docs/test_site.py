"""The site leads from a page to files outside of docs/, which it does not hold."""

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.docs.pages import ROOT

PICTURE = "benchmarks/results/study.png"
PAGE = f"""\
# Page

[a config](../../conf/config.yaml) ![a picture](../../{PICTURE}) [a page](other.md#other)
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The HTML of a page with links to the repository, and the site's folder."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("conf", "benchmarks"):
        (root / name).symlink_to(ROOT / name)
    (root / "docs" / "deep").mkdir(parents=True)
    (root / "docs" / "deep" / "page.md").write_text(PAGE)
    (root / "docs" / "deep" / "other.md").write_text("# Other\n")
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(root / "docs"),
        site_dir=str(root / "site"),
        nav=["deep/page.md", "deep/other.md"],
        plugins=[],
        theme="mkdocs",
        strict=True,
    )
    build(config)
    return (root / "site" / "deep" / "page" / "index.html").read_text(), root / "site"


def test_a_link_to_a_file_of_the_repository_leads_to_its_page_on_the_web(page):
    assert 'href="https://github.com/lit-rlkv/lit_rlkv/blob/main/conf/config.yaml"' in page[0]


def test_a_picture_of_the_repository_is_copied_into_the_site(page):
    html, site = page
    assert 'src="../../images/study.png"' in html
    assert (site / "images" / "study.png").read_bytes() == (ROOT / PICTURE).read_bytes()


def test_a_link_to_another_page_stays_in_the_site(page):
    assert 'href="../other/#other"' in page[0]
