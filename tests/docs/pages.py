"""The pages for people: README, CONTRIBUTING and the site, with their code blocks and shell commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
}
"""Texts by path."""
TRUST = "trusted_modules=[mypackage]"
"""Word of the commands of pages on modules of your own, which test_how_to.py runs."""
ASSIGNMENT = re.compile(r"[A-Z_]+=")


def code_blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language, also those in a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.M | re.S)
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in found]


def without_code(text: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def shell_commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command in the shell blocks, without comments, variables and redirections."""
    for block in code_blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                command, words = words[:end], words[end + 1 :]
                while command and ASSIGNMENT.match(command[0]):
                    command = command[1:]
                yield tuple(command[: command.index(">")] if ">" in command else command)
