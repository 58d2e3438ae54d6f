"""Rows of text in columns."""

from collections.abc import Sequence


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]], n_left: int = 1) -> str:
    """Columns as wide as they must be; the first `n_left` to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if number < n_left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (headings, *rows)
    ]
    return "\n".join(lines)
