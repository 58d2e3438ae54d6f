"""The package as others get it: the wheel, its page on an index, its types, and programs run from it."""

import contextlib
import email
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
USER_FILE = """\
import lit_rlkv
from lit_rlkv import CacheSpec, Rollout, generate, prepare_backbone, replay_logps
reveal_type((lit_rlkv.__version__, CacheSpec.dense().budget, generate, prepare_backbone, replay_logps))
def n_rows(rollout: Rollout) -> str:
    return len(rollout.input_ids)
"""


def built_wheel(root, folder):
    with contextlib.chdir(root):  # as build front ends do
        (wheel,) = WheelBuilder(str(root)).build(directory=str(folder), versions=["standard"])
    return Path(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built_wheel(ROOT, tmp_path_factory.mktemp("dist"))


def metadata(wheel):
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(files.read(name))


def links(page):
    """Return the targets of all links and images of a Markdown page, also of those in HTML."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"\]\(([^)\s]+)", page) + re.findall(r'\b(?:src|srcset|href)="([^"]+)"', page)
    return inline + re.findall(r"^\[[^\]]+\]:\s*(\S+)", page, flags=re.MULTILINE)


def test_the_page_on_an_index_has_the_readme_with_no_relative_link(wheel):
    page = metadata(wheel).get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text()
    assert len(links(page)) == len(links(readme)) > 0
    assert [link for link in links(page) if not link.startswith("https://")] == []
    assert [link for link in links(readme) if not link.startswith("https://")] != []


def test_links_images_and_headings_lead_to_the_repository(tmp_path):
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for name in ("LICENSE", "lit_rlkv/__init__.py", "conf/config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "README.md").write_text(
        "[map](docs/map.md) ![a figure](docs/a.png) [![badge](b.svg)](LICENSE) [below](#results) "
        '[paper](https://arxiv.org/abs/2605.06850) <img src="c.png"> <a href="notebooks/LOG.md">log</a>'
    )
    repository = URLS["Repository"]
    page = metadata(built_wheel(tmp_path, tmp_path / "dist")).get_payload()
    assert [link.removeprefix(repository) for link in links(page)] == [
        "/blob/HEAD/docs/map.md",
        "/raw/HEAD/docs/a.png",
        "/raw/HEAD/b.svg",
        "/blob/HEAD/LICENSE",
        "#results",
        "https://arxiv.org/abs/2605.06850",
        "/raw/HEAD/c.png",
        "/blob/HEAD/notebooks/LOG.md",
    ]


def test_an_index_shows_where_the_project_lives_and_that_it_is_typed(wheel):
    shown = metadata(wheel)
    named = dict(value.split(", ") for value in shown.get_all("Project-URL"))
    assert named.keys() >= {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    assert "Typing :: Typed" in shown.get_all("Classifier")
    assert (shown["Author"], shown["License-Expression"]) == ("The lit_rlkv authors", "Apache-2.0")


def test_the_wheel_ships_types_configs_and_sweeps_in_the_package(wheel):
    shipped = set(zipfile.ZipFile(wheel).namelist())
    assert {"lit_rlkv/py.typed", "lit_rlkv/conf/config.yaml"} <= shipped
    sweeps = {f"lit_rlkv/sweeps/{path.name}" for path in (ROOT / "sweeps").iterdir()}
    assert sweeps <= shipped
    assert {name.split("/")[0] for name in shipped} == {
        "lit_rlkv",
        f"lit_rlkv-{metadata(wheel)['Version']}.dist-info",
    }


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Return the Python of a fresh environment that has the wheel, and the other packages of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", str(wheel)], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(own, "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


def run(program, arguments, folder):
    """Run a program of the fresh environment in a folder that has nothing of the clone."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [program, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_wheel_in_a_fresh_environment_trains_from_any_folder(python, tmp_path):
    where = "import lit_rlkv.config as config; print(config.__file__, config.CONF_DIR, config.SWEEPS_DIR)"
    found = run(python, ["-c", where], tmp_path).stdout.split()
    assert [path.startswith(str(python.parents[1])) for path in found] == [True, True, True]
    ended = run(python.with_name("lit-rlkv"), ["fit", "debug=fast"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    (report,) = tmp_path.glob("runs/debug/*/report.html")
    assert report.stat().st_size > 10_000


@pytest.mark.slow
def test_mypy_sees_the_types_of_all_public_names(python, tmp_path):
    (tmp_path / "mine.py").write_text(USER_FILE)
    checker = ["-m", "mypy", "--strict", "--python-executable", str(python), "mine.py"]
    said = run(sys.executable, checker, tmp_path).stdout
    assert re.search(r'Revealed type is "tuple\[(builtins\.)?str, (builtins\.)?int, def \(', said), said
    assert "Any, fallback" not in said
    assert "mine.py:5: error: Incompatible return value type" in said
    assert "Found 1 error in 1 file" in said, said
