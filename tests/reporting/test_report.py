import re
from dataclasses import replace

import pytest

from lit_rlkv.reporting.logged_samples import LoggedSample
from lit_rlkv.reporting.pictures import figures
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.report import render, tiles
from tests.reporting.reports import EMPTY, FULL, Page

DENSE = FULL.config_yaml.replace("policy: random", "policy: dense")


def test_the_tiles_are_the_accuracies_with_intervals_and_the_costs_of_the_own_cache():
    # Wilson, 0.81 of 128: z² = 3.8415; centre 0.80097, half 0.06757
    assert tiles(FULL) == [
        ("Accuracy, random 16+4", "81.0%", "was 45.6%; 95% interval 73.3–86.9"),
        ("Accuracy, dense", "98.0%", "was 99.0%; 95% interval 93.8–99.4"),
        ("Mean reward", "0.75", "was 0.25; 2 iterations"),
        ("Cache memory", "100%", "of a dense cache"),
        ("KL from dense", "0.100", "nats per token, by eviction"),
    ]
    assert tiles(EMPTY) == []
    beyond = [replace(row, accuracy=1.5) for row in FULL.after]
    assert tiles(replace(FULL, after=beyond))[0][1:] == ("150.0%", "was 45.6%")
    assert "150.0%" in Page(render(replace(FULL, after=beyond), figures(replace(FULL, after=beyond)))).texts
    assert [heading for heading, *_ in tiles(replace(FULL, config_yaml=DENSE))] == [
        "Accuracy, dense",
        "Mean reward",
    ]


@pytest.fixture(scope="module")
def full_page():
    return render(FULL, figures(FULL))


def test_the_page_needs_nothing_from_outside_and_every_link_leads_to_one_place_of_it(full_page):
    page = Page(full_page)
    assert page.is_balanced
    assert page.open == []
    assert not {"script", "link", "iframe", "object", "img"} & set(page.tags)
    assert "@import" not in full_page
    assert len(page.links) > 20
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    urls = re.findall(r"url\(([^)]*)", full_page)
    assert all(place.startswith("#") for place in urls)
    places = {place[1:] for place in (*page.links, *urls) if place.startswith("#")}
    assert {page.ids.count(place) for place in places} == {1}


def test_every_colour_of_a_figure_has_one_for_a_dark_page(full_page):
    bodies = re.findall(r"<svg.*?</svg>", full_page, flags=re.DOTALL)
    assert len(bodies) == Page(full_page).count("figure") == 4
    used = {color for body in bodies for color in re.findall(r"(?:fill|stroke): (#\w+)", body)}
    light = {color for color, _ in style.SCHEME.values()}
    assert {style.INK, style.GRID, style.BLUE} <= used <= light
    dark = full_page[: full_page.index("</style>")].split("@media (prefers-color-scheme: dark)")[1]
    for color, exchanged in style.SCHEME.values():
        assert f'[style*="stroke: {color}"] {{ stroke: {exchanged} !important }}' in dark


def test_texts_of_a_run_are_no_html(full_page):
    assert "script" not in Page(full_page).tags
    assert "<title>a &lt;run&gt; &amp; more</title>" in full_page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in full_page
    assert "1 &lt; 2 &amp; 3" in full_page
    assert "&lt;img src=x onerror=y&gt;" in full_page
    assert "&lt;b&gt; 1" in full_page


def test_sections_stand_in_order_and_in_the_table_of_contents(full_page):
    page = Page(full_page)
    sections = ["Training", "Evaluation", "Mismatch", "Cache", "Cost", "Samples", "Config"]
    assert [name for name in page.ids if name in sections] == sections
    assert [link for link in page.links if link[1:] in sections] == [f"#{name}" for name in sections]
    training_only = Page(render(history_only := replace(EMPTY, history=FULL.history), figures(history_only)))
    assert [name for name in training_only.ids if name in sections] == ["Training", "Mismatch"]


def test_samples_stand_with_their_reference_and_wrong_ones_are_marked():
    samples = [
        LoggedSample("1+1=", "2", 1.0, 1, "2", is_right=True),
        LoggedSample("1+2=", "4", 0.0, 1, "three", is_right=False),
        LoggedSample("a poem", "roses", 0.7, 2),
    ]
    page = Page(render(replace(EMPTY, samples=samples), []))
    assert [name for name in page.classes if name in ("sample", "right", "wrong")] == [
        *("sample", "right"),
        *("sample", "wrong"),
        "sample",
    ]
    texts = [text.strip() for text in page.texts if text.strip()]
    assert "✗ wrong" in texts
    assert texts[texts.index("three") - 1] == "Reference"
    assert texts.count("Reference") == 2  # the poem has none
    assert [text for text in texts if text.startswith("Iteration")] == ["Iteration 1", "Iteration 2"]


def test_a_run_that_did_nothing_has_a_page_without_empty_sections():
    page = render(EMPTY, [])
    assert not {"h2", "table", "figure", "details", "footer", "nav", "dl"} & set(Page(page).tags)
    assert "neither trained nor evaluated" in page


def test_a_figure_that_fails_costs_a_warning_and_nothing_else(monkeypatch, caplog):
    def fail(*_, **__):
        raise ZeroDivisionError("no pixels")

    pictures = figures(FULL)
    monkeypatch.setattr(pictures[0].figure, "savefig", fail)
    assert Page(render(FULL, pictures)).count("figure") == len(pictures) - 1
    assert f"the figure {pictures[0].name!r} cannot be drawn: ZeroDivisionError: no pixels" in caplog.text
