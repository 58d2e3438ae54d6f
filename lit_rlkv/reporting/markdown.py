"""Tables in Markdown, for TensorBoard's text page and for the card of an exported model."""

from collections.abc import Sequence

from lit_rlkv.reporting.summary import ABSENT


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str | float | int | None]]) -> str:
    """One line a row; bars and line breaks of a cell are kept from ending it."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: str | float | int | None) -> str:
    if value is None:
        return ABSENT
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "&#124;").replace("\n", "<br>")
