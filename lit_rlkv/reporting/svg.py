"""Figures as inline SVG for a page: their colours are CSS variables, which follow its colour scheme."""

import io
import re

import matplotlib
from matplotlib.artist import Artist
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch

from lit_rlkv.reporting.plots import style

SCHEMES = {
    "light": {
        "ink": style.INK,
        "muted": style.MUTED,
        "grid": style.GRID,
        "paper": style.PAPER,
        "blue": style.BLUE,
        "vermillion": style.VERMILLION,
        "green": style.GREEN,
        "purple": style.PURPLE,
        "orange": style.ORANGE,
        "sky": style.SKY,
        "sand": style.SAND,
    },
    "dark": {
        "ink": "#e4e7ec",
        "muted": "#9aa2b1",
        "grid": "#313843",
        "paper": "#14171c",
        "blue": "#58aef0",
        "vermillion": "#ff8f4d",
        "green": "#3ccf9e",
        "purple": "#e6a2cc",
        "orange": "#f2b632",
        "sky": "#9ad7fb",
        "sand": "#8d6c3c",
    },
}
"""Colour of each CSS variable in a light and in a dark page; figures are drawn in the light colours."""

RASTER_DPI = 200
"""Resolution of the parts that are pixels, such as the cells of a heat map."""


MAX_VECTOR_POINTS = 1000
"""Most points of a curve that is drawn as a shape; longer ones are pixels, in the light colours."""


def inline_svg(figure: Figure, key: str, label: str) -> str:
    """Return a figure as an `<svg>` element without ids that another figure of the page may have.

    Args:
        key: unique name of the figure on its page.
        label: text for screen readers.
    """
    buffer = io.StringIO()
    for artist in figure.findobj(_is_long):
        artist.set_rasterized(True)
    # Texts stay texts: smaller, searchable, and in the font of the page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, dpi=RASTER_DPI, metadata=metadata)
    svg = buffer.getvalue()
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = re.sub(r"'DejaVu Sans Mono'[^;\"]*", "var(--mono)", body)
    body = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--sans)", body)
    for name, color in SCHEMES["light"].items():
        body = re.sub(f"{color}\\b", f"var(--{name})", body, flags=re.IGNORECASE)
    width, height = (72 * size for size in figure.get_size_inches())
    described = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{described}">{body}'


def _is_long(artist: Artist) -> bool:
    """Return True if a curve, a band or a bar chart has so many points that its SVG would be megabytes."""
    paths = [artist.get_path()] if isinstance(artist, Line2D | StepPatch) else []
    if isinstance(artist, PolyCollection):
        paths = list(artist.get_paths())
    return sum(len(path) for path in paths) > MAX_VECTOR_POINTS


def scheme_css(name: str) -> str:
    """Return the CSS declarations of a scheme's variables."""
    return "; ".join(f"--{variable}: {color}" for variable, color in SCHEMES[name].items())
