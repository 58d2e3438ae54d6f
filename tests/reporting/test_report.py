import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from jinja2 import Template

from lit_rlkv.reporting import report as report_module
from lit_rlkv.reporting.pictures import figures
from lit_rlkv.reporting.report import headline, render, write_report
from tests.reporting.reports import EMPTY, FULL, eval_row


def test_the_headline_is_the_gain_under_the_budget():
    assert headline(FULL) == [
        "Accuracy under a budget of 16 keys: 0.46 → 0.81; dense: 0.99 → 0.98.",
        "Mean reward of the rollouts over 2 iterations: 0.25 → 0.75.",
    ]


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"before": [], "history": []}, ["Accuracy under a budget of 16 keys: 0.81; dense: 0.98."]),
        ({"budget": None, "history": []}, ["Accuracy with a dense cache: 0.99 → 0.98."]),
        ({"before": [], "after": [], "history": []}, ["This run neither trained nor evaluated a policy."]),
        (
            {"before": [], "after": [], "history": [{"iteration": 1, "reward": 0.5}]},
            ["Mean reward of the rollouts in one iteration: 0.50."],
        ),
        (
            {"before": [], "after": [eval_row("random 8+4", 8, 0.1)], "history": []},
            ["The run's own cache was not evaluated."],
        ),
    ],
)
def test_the_headline_tells_only_what_was_measured(changes, sentences):
    assert headline(replace(FULL, **changes)) == sentences


VOID = {"meta", "img", "br"}


class Balance(HTMLParser):
    """Collects tags and links, and whether tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], [], []
        self.is_balanced = True

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.is_balanced &= self.open.pop() == tag


def parsed(page):
    parser = Balance()
    parser.feed(page)
    return parser


@pytest.fixture(scope="module")
def full_page():
    return render(FULL, figures(FULL))


def test_the_page_needs_nothing_from_outside(full_page):
    parser = parsed(full_page)
    assert parser.is_balanced
    assert parser.open == []
    assert not re.search(r"https?://", full_page)
    assert not {"script", "link", "iframe", "object"} & set(parser.tags)
    assert "@import" not in full_page
    assert "url(" not in full_page
    assert len(parser.links) == 6
    assert all(link.startswith("data:image/png;base64,") for link in parser.links)


def test_texts_of_a_run_are_no_html(full_page):
    assert "script" not in parsed(full_page).tags
    assert "<title>a &lt;run&gt; &amp; more</title>" in full_page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in full_page
    assert "1 &lt; 2 &amp; 3" in full_page
    assert "&lt;img src=x onerror=y&gt;" in full_page
    assert "&lt;b&gt; 1" in full_page


def test_the_check_for_html_would_notice_an_unescaped_text(monkeypatch):
    monkeypatch.setattr(report_module, "TEMPLATE", Template(report_module.PAGE, autoescape=False))
    assert "script" in parsed(render(replace(FULL, title="a run"), [])).tags


def test_the_page_shows_every_part(full_page):
    for part in (
        "Evaluation",
        "Pictures",
        "Samples",
        "Time per stage",
        "Config",
        "0.456",
        "random 16+4",
        "torch 2.13.0",
    ):
        assert part in full_page
    assert "prefers-color-scheme: dark" in full_page
    assert full_page.count("<figcaption>") == 6


def test_a_learned_reward_stands_beside_the_accuracy():
    rows = [replace(row, learned_reward=value) for row, value in zip(FULL.after, (1.25, -0.5), strict=True)]
    page = render(replace(FULL, before=[], after=rows), [])
    assert "Learned reward after" in page
    assert "1.25" in page
    assert "-0.50" in page
    assert "Learned reward" not in render(FULL, [])


def test_a_run_that_did_nothing_has_a_page_without_empty_sections():
    page = render(EMPTY, [])
    parser = parsed(page)
    assert not {"h2", "table", "figure", "details", "footer"} & set(parser.tags)
    assert "neither trained nor evaluated" in page


def test_a_report_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, EMPTY, [])
    assert path.read_text(encoding="utf-8") == render(EMPTY, [])
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    broken = replace(EMPTY, after=[FULL.after[0], FULL.after[0]])
    with pytest.raises(ValueError, match="lists a cache twice"):
        write_report(path, broken, [])
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
