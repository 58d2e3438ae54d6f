"""Write the tables of names of TRL and verl into docs/how-to, from lit_rlkv/config/foreign_names.yaml."""

import re
from pathlib import Path

from lit_rlkv.config.hints import foreign_rows

PAGES = Path(__file__).parent.parent / "docs" / "how-to"


def with_table(text: str, package: str) -> str:
    """Return the text of a page with its table of names as it should be."""
    rows = "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in foreign_rows()[package])
    return re.sub(r"(\n\|---\|---\|---\|\n)(?:\|.*\n)+", lambda head: head[1] + rows, text, count=1)


if __name__ == "__main__":
    for package in ("trl", "verl"):
        page = PAGES / f"from-{package}.md"
        page.write_text(with_table(page.read_text(encoding="utf-8"), package), encoding="utf-8")
