"""The set-up keeps its promises: pins inside ranges, bad releases refused, configs shipped, checks on."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lit_rlkv.types import PromptBatch

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(constraints: str) -> dict[str, Version]:
    """Name and version of every line `name==version`; any other kind of requirement is an error."""
    lines = [line.split("#")[0].strip() for line in constraints.splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def unmet(requirements: list[str], pins: dict[str, Version]) -> list[str]:
    """The requirements of this platform that have no pin, or one outside their range."""
    wanted = [Requirement(text) for text in requirements]
    return [
        r.name
        for r in wanted
        if (r.marker is None or r.marker.evaluate())
        and not ((pin := pins.get(canonicalize_name(r.name))) and pin in r.specifier)
    ]


def test_every_direct_dependency_is_pinned_inside_its_range():
    pins = pinned((ROOT / "constraints.txt").read_text())
    extras = PROJECT["optional-dependencies"]
    own, *dev = extras["dev"]  # first the extras whose tests run, too
    tested = [text for name in Requirement(own).extras for text in extras[name]]
    assert len(tested) >= 5
    assert unmet([*PROJECT["dependencies"], *tested, *dev], pins) == []


def test_pins_are_release_versions_without_a_local_build():
    # torch==2.13.0 also accepts a local 2.13.0+cpu; a pin on +cpu would accept nothing else
    pins = pinned((ROOT / "constraints.txt").read_text())
    assert [name for name, version in pins.items() if version.local] == []


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_malicious_lightning_releases_are_excluded(name):
    (accepted,) = [r.specifier for r in map(Requirement, PROJECT["dependencies"]) if r.name == name]
    assert [v for v in ("2.6.2", "2.6.3", "2.6.6") if v in accepted] == ["2.6.6"]


def make_clone(root: Path, files: dict[str, str]) -> None:
    """A tree with this project's pyproject.toml and the files given."""
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("LICENSE", "README.md"):
        (root / name).write_text("")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def lint_layers(root: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("importer", "imported", "is_allowed"),
    [
        ("data", "rewards", True),
        ("rewards", "rng", True),
        ("rewards", "data", False),  # upwards
        ("rewards", "objectives", False),  # sideways
        ("experience.reward", "config.schema", True),
        ("experience.reward", "config.targets", False),  # training needs the schema alone
    ],
)
def test_import_layers_are_enforced(tmp_path, importer, imported, is_allowed):
    packages = ["config", "experience", "modules", "reporting", "runs", "stages"]
    rooms = ["__init__", "types", "rng", "rewards", "objectives", "data", "trainer"]
    rooms += [f"{package}.__init__" for package in packages]
    rooms += ["config.schema", "config.targets", "experience.reward"]
    files = {room: f"lit_rlkv/{room.replace('.', '/')}.py" for room in rooms}
    imports = {files[importer]: f"import lit_rlkv.{imported}\n"}
    make_clone(tmp_path, dict.fromkeys(files.values(), "") | imports)
    report = lint_layers(tmp_path)
    assert (report.returncode == 0) is is_allowed, report.stdout
    assert f"{1 + is_allowed} kept, {int(not is_allowed)} broken" in report.stdout


def test_shapes_in_signatures_are_checked_by_make_test_shapes(pytestconfig):
    if not pytestconfig.getoption("jaxtyping_packages"):
        pytest.skip("make test-shapes checks shapes")
    ids = torch.zeros(2, 3, dtype=torch.int64)
    PromptBatch(input_ids=ids, attention_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeCheckError):
        PromptBatch(input_ids=ids, attention_mask=torch.ones(2, 4, dtype=torch.bool))
