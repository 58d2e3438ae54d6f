"""MkDocs hook: links from a page to files outside docs/ lead to the repository, and images are copied.

So a page has the same relative links on GitHub, in the site, and in the tests.
"""

import re
from pathlib import Path
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(!?)(\[[^\]]*\]\()((?:\.\./)+[^)#\s]+)((?:#[^)\s]+)?\))")
"""An exclamation mark where it is an image, the text, a path that goes up, and the rest."""
IMAGES = "images"
"""Folder of the site for images from outside docs/."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with the links to files outside docs/ replaced."""
    docs_dir = Path(config.docs_dir)
    here = f"{docs_dir.name}/{page.file.src_uri}"

    def replaced(found: re.Match[str]) -> str:
        bang, text, path, rest = found.groups()
        target = normpath(f"{here}/../{path}")
        if target.startswith(f"{docs_dir.name}/") or not (docs_dir.parent / target).exists():
            return found[0]
        if not bang:
            return f"{text}{config.repo_url}/blob/main/{target}{rest}"
        copy = f"{IMAGES}/{Path(target).name}"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(docs_dir.parent / target)))
        return f"!{text}{relpath(copy, str(Path(page.file.src_uri).parent))}{rest}"

    return LINK.sub(replaced, markdown)
