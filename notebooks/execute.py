"""Run notebooks and keep their outputs.

    python notebooks/execute.py [--small] [NOTEBOOK ...]

By default it runs all of them at the size whose outputs are committed, and writes them in place. --small is
the size of the tests; it shows that the notebooks still work, and keeps nothing. A notebook asks for its size
by `os.environ.get("LIT_RLKV_SMALL") == "1"`, and names files relative to its own folder.

The metadata of a notebook say which code its outputs come from: `outputs_of` is a digest of its cells,
`curve` one of the figures that `benchmarks/curve.py` keeps.

A code cell has one comment `# alt: TEXT` for each image that it shows, in the same order. TEXT becomes the
alt text of the image; it goes on in comment lines that are indented by three spaces or more.
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "benchmarks"))

import curve  # noqa: E402  # a script beside what it runs, in no package

SIZE = "LIT_RLKV_SMALL"
# One thread: more threads than free cores slow small tensors down and change the last digits. The warning is
# that of tqdm, which dependencies import, about a package for progress bars that no notebook shows.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
ALT = re.compile(r"^ *# alt: *(.*(?:\n *#   .*)*)", re.MULTILINE)


def run(notebook: NotebookNode, folder: Path, *, is_small: bool) -> NotebookNode:
    """Return the notebook with fresh outputs; its kernel starts in `folder`, and a cell that fails raises."""
    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env={**os.environ, **ENVIRONMENT, SIZE: str(int(is_small))})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            add_alt_texts(cell)
    notebook.metadata = NotebookNode(
        kernelspec=NotebookNode(KERNEL),
        language_info=NotebookNode(name="python"),
        outputs_of=fingerprint(notebook),
        curve=curve.digest(curve.on_record()),
    )
    return notebook


def add_alt_texts(cell: NotebookNode) -> None:
    """Write the `# alt:` comments of a code cell into the metadata of its images."""
    texts = [" ".join(re.sub(r"\n *#", " ", text).split()) for text in ALT.findall(cell.source)]
    images = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    if len(texts) != len(images):
        raise ValueError(
            f"a cell must have one '# alt: ...' comment per image, got {len(texts)} for {len(images)}; "
            f"add or remove comments in\n{cell.source}"
        )
    for output, text in zip(images, texts, strict=True):
        output.metadata.setdefault("image/png", NotebookNode())["alt"] = text


def fingerprint(notebook: NotebookNode) -> str:
    """Return a digest of all code, to recognize outputs of an earlier version."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.blake2b(code.encode(), digest_size=8).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--small", action="store_true", help="the size of the tests; outputs are not kept")
    args = parser.parse_args()
    for path in args.notebooks:
        print(path.name, flush=True)
        notebook = run(nbformat.read(path, as_version=4), path.resolve().parent, is_small=args.small)
        if not args.small:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
