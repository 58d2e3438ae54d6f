"""MkDocs hook: pages may include and link to files of the repository that lie outside of docs/.

A link leads to the file in the repository, an image is copied into the site, and a line such as
`--8<-- "notebooks/LOG.md"` becomes the text of that file. Headings get the anchors that GitHub makes, but a
key keeps its dots, and no page asks GitHub's API for the stars of the repository.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]+)?\))")
"""An exclamation mark where it is an image, the text, a relative path, and the rest."""
INCLUDE = re.compile(r'^--8<-- "([^"]+)"$', re.M)
IMAGES = "images"
"""Folder of the site for images from outside of docs/."""

STARS = ' data-md-component="source"'
"""What makes the theme's script look the repository up."""


def anchor(heading: str, separator: str) -> str:
    """Return the anchor of a heading: a key itself, elsewhere the one that GitHub makes."""
    is_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", heading)
    return heading if is_key else re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> None:
    config.mdx_configs["toc"]["slugify"] = anchor


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    return output.replace(STARS, "")


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    return output.replace(STARS, "")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with files included, and with its links to files outside of docs/ replaced."""
    docs_dir = Path(config.docs_dir)
    root, here = docs_dir.parent, dirname(f"{docs_dir.name}/{page.file.src_uri}")

    def included(found: re.Match[str]) -> str:
        text = (root / found[1]).read_text(encoding="utf-8")
        return LINK.sub(lambda link: moved(link, dirname(found[1])), text)

    def moved(found: re.Match[str], there: str) -> str:
        bang, text, path, rest = found.groups()
        return f"{bang}{text}{relpath(normpath(f'{there}/{path}'), here)}{rest}"

    def replaced(found: re.Match[str]) -> str:
        bang, text, path, rest = found.groups()
        target = normpath(f"{here}/{path}")
        if target.startswith(f"{docs_dir.name}/") or not (root / target).exists():
            return found[0]
        if not bang:
            return f"{text}{config.repo_url}/blob/main/{target}{rest}"
        copy = f"{IMAGES}/{Path(target).name}"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(root / target)))
        return f"!{text}{relpath(copy, dirname(page.file.src_uri))}{rest}"

    return LINK.sub(replaced, INCLUDE.sub(included, markdown))
