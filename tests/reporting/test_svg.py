"""Figures as inline SVG."""

import re

import pytest
from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.svg import MAX_VECTOR_POINTS, inline_svg


def line_of(n_points, color=style.BLUE):
    figure = Figure(figsize=(2, 1))
    figure.add_subplot().plot(range(n_points), [index % 7 for index in range(n_points)], color=color)
    return figure


def test_a_figure_becomes_an_element_of_its_size_with_a_label():
    svg = inline_svg(line_of(3), "figures/x", 'a "b" < c & d')
    assert svg.startswith('<svg viewBox="0 0 144 72" role="img" aria-label="a &quot;b&quot; &lt; c &amp; d">')
    assert svg.rstrip().endswith("</svg>")
    assert "http" not in svg


def test_colours_of_the_palette_become_variables_and_others_stay():
    assert "stroke: var(--blue)" in inline_svg(line_of(3), "x", "")
    assert "stroke: #123456" in inline_svg(line_of(3, "#123456"), "x", "")


def test_texts_are_texts_in_the_font_of_the_page():
    figure = line_of(3)
    figure.axes[0].set_title("KL(μ ‖ π)")
    svg = inline_svg(figure, "x", "")
    assert "KL(μ ‖ π)" in svg
    assert "var(--sans)" in svg
    assert "DejaVu" not in svg


def test_ids_of_two_figures_differ_and_a_figure_is_drawn_alike_twice():
    first, again, other = (inline_svg(line_of(3), key, "") for key in ("a", "a", "b"))
    ids = [set(re.findall(r'id="([^"]*)"', svg)) for svg in (first, other)]
    assert first == again
    assert ids[0]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize(
    ("n_points", "is_image"), [(MAX_VECTOR_POINTS, False), (20 * MAX_VECTOR_POINTS, True)]
)
def test_curves_of_very_many_points_are_pixels_so_that_the_page_stays_small(n_points, is_image):
    svg = inline_svg(line_of(n_points), "x", "")
    assert ("<image" in svg) is is_image
    assert len(svg) < 200_000
