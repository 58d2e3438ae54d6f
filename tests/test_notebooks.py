"""The notebooks run from a fresh clone, and what they show is committed, clean, and of the code above it."""

import base64
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))

from execute import KERNEL, add_alt_texts, curve, fingerprint, run  # noqa: E402  # a script beside what it runs, in no package

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_IMAGE_BYTES, MAX_BYTES = 200_000, 1_500_000
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|root|Users|tmp|usr|opt|work|mnt|var|private)/")
OWN_PATHS = (str(ROOT), str(Path.home()), sys.prefix)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def shown(output: NotebookNode) -> str:
    """Return the text of an output."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return "\n".join(text for kind, text in output.data.items() if kind.startswith("text/"))


def images(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for output in outputs(notebook) if "image/png" in output.get("data", {})]


def image_defects(output: NotebookNode) -> list[str]:
    png = base64.b64decode(output.data["image/png"])
    shown_as = output.metadata.get("image/png", {})
    width = int.from_bytes(png[16:20])  # pixels, by the header of the file
    found = []
    if len(png) > MAX_IMAGE_BYTES:
        found.append(f"an image of {len(png)} bytes")
    if not shown_as.get("alt"):
        found.append("an image without alt text")
    if width < 2 * shown_as.get("width", width):
        found.append(f"an image of {width} pixels, shown as {shown_as.get('width', width)}")
    return found


def defects(notebook: NotebookNode) -> list[str]:
    """Return the faults that must not be committed."""
    found = []
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"cells were not run once each, from top to bottom: {counts}")
    if notebook.metadata != {
        "kernelspec": KERNEL,
        "language_info": {"name": "python"},
        "outputs_of": fingerprint(notebook),
        "curve": curve.digest(curve.on_record()),
    }:
        found.append("metadata are not those of execute.py on this code; run it again")
    if any(cell.metadata for cell in notebook.cells):
        found.append("a cell has metadata")
    for output in outputs(notebook):
        text = shown(output)
        if output.output_type == "error":
            found.append(f"an error: {output.ename}")
        elif output.get("name") == "stderr" or "Warning" in text:
            found.append(f"a warning: {text[:200]}")
        if MACHINE_PATH.search(text) or any(path in text for path in OWN_PATHS):
            found.append(f"a path of the machine: {text[:200]}")
        if "\x1b" in text:
            found.append(f"control codes of a terminal: {text[:200]!r}")
    found += [defect for output in images(notebook) for defect in image_defects(output)]
    if not images(notebook):
        found.append("no figure")
    if len(nbformat.writes(notebook)) > MAX_BYTES:
        found.append("the notebook is too large")
    return found


def kinds(notebook: NotebookNode) -> list[set[str]]:
    """Return the kinds of output of each code cell."""
    return [
        {kind for output in cell.outputs for kind in output.get("data", [output.output_type])}
        for cell in code_cells(notebook)
    ]


@pytest.fixture
def fresh_clone(tmp_path: Path) -> Path:
    """Copy the tracked files, without leftovers of earlier runs."""
    for path in ROOT.iterdir():
        if path.name not in ("notebooks", "runs", "dist", "build") and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "notebooks").mkdir()
    for script in (ROOT / "notebooks").glob("*.py"):
        (tmp_path / "notebooks" / script.name).symlink_to(script)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_small_from_a_fresh_clone_and_shows_the_same_kinds_of_output(path, fresh_clone):
    committed = read(path)
    small = run(read(path), fresh_clone / "notebooks", is_small=True)
    assert kinds(small) == kinds(committed)
    assert defects(small) == []
    assert len(images(small)) == len(images(committed))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_there_and_clean(path):
    assert defects(read(path)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_files_that_a_notebook_links_to_exist(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (path.parent / target).exists(), target


def test_alt_texts_come_from_comments_one_for_each_image():
    def drawn():
        return new_output("display_data", data={"image/png": ""}, metadata={"image/png": {}})

    first, second = drawn(), drawn()
    source = "# alt: A curve\n#   that rises.\ndraw()\n# alt: Bars.\n# no alt text\ndraw()"
    add_alt_texts(new_code_cell(source, outputs=[first, second]))
    alts = [output.metadata["image/png"]["alt"] for output in (first, second)]
    assert alts == ["A curve that rises.", "Bars."]
    with pytest.raises(ValueError, match="# alt:"):
        add_alt_texts(new_code_cell(source, outputs=[drawn()]))


def test_a_notebook_gets_its_size_from_the_environment_and_runs_in_its_folder(tmp_path):
    source = "import os\nprint(os.environ['LIT_RLKV_SMALL'], os.listdir())"
    (tmp_path / "beside.txt").touch()
    for is_small in (True, False):
        notebook = run(new_notebook(cells=[new_code_cell(source)]), tmp_path, is_small=is_small)
        assert shown(outputs(notebook)[0]) == f"{int(is_small)} ['beside.txt']\n"
    assert "LIT_RLKV_SMALL" not in os.environ
