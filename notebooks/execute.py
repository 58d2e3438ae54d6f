"""Run notebooks and keep what they show.

    python notebooks/execute.py [--small] [NOTEBOOK ...]

By default all of them, at the size whose outputs are committed; they are written in place. --small is the
size at which the tests run them, to see that they still work, and keeps nothing. A notebook asks for its size
as `os.environ.get("LIT_RLKV_SMALL") == "1"`, and names files relative to its own folder.
"""

import argparse
import hashlib
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
SIZE = "LIT_RLKV_SMALL"
# One thread: more than there are free cores make small tensors slower, and change the last digits. And tqdm,
# which others import, misses a package for bars that no notebook shows.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def run(notebook: NotebookNode, folder: Path, *, is_small: bool) -> NotebookNode:
    """The notebook with fresh outputs, its kernel started in a folder; a cell that fails raises."""
    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env={**os.environ, **ENVIRONMENT, SIZE: str(int(is_small))})
    notebook.metadata = NotebookNode(
        kernelspec=NotebookNode(KERNEL),
        language_info=NotebookNode(name="python"),
        outputs_of=fingerprint(notebook),
    )
    return notebook


def fingerprint(notebook: NotebookNode) -> str:
    """Return a digest of all code, which tells outputs from those of an earlier version."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.blake2b(code.encode(), digest_size=8).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--small", action="store_true", help="as the tests do; outputs are not kept")
    args = parser.parse_args()
    for path in args.notebooks:
        print(path.name, flush=True)
        notebook = run(nbformat.read(path, as_version=4), path.resolve().parent, is_small=args.small)
        if not args.small:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
