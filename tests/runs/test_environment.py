import json
import shlex
import subprocess
import sys

import pytest
import torch

from lit_rlkv.config import Config
from lit_rlkv.config.schema import SFTConfig
from lit_rlkv.run_files import ENVIRONMENT
from lit_rlkv.runs.environment import describe, describe_device, git_state, installed, record

CFG = Config(seed=3, sft=SFTConfig(seed=5))


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "fit.py").write_text("a = 1\n")
    git(tmp_path, "add", "fit.py")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clone_knows_its_commit_and_whether_it_was_changed(clone):
    commit = git(clone, "rev-parse", "HEAD")
    assert git_state(clone) == {"commit": commit, "is_dirty": False}
    (clone / "notes.txt").write_text("not of the code")
    assert git_state(clone) == {"commit": commit, "is_dirty": False}
    (clone / "fit.py").write_text("a = 2\n")
    assert git_state(clone) == {"commit": commit, "is_dirty": True}


def test_a_commit_of_something_else_around_the_package_does_not_count(clone):
    site_packages = clone / "venv" / "lit_rlkv"
    site_packages.mkdir(parents=True)
    (site_packages / "fit.py").write_text("a = 1\n")
    assert git_state(site_packages) is None


def test_without_git_there_is_no_commit(clone, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_state(clone) is None


def test_the_environment_says_what_would_be_needed_to_do_it_again():
    found = describe(CFG, torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["seeds"] == {"seed": 3, "sft.seed": 5}
    assert found["packages"]["torch"] == torch.__version__
    assert found["device"]["type"] == "cpu"
    assert shlex.split(found["command"]) == sys.orig_argv
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")


@pytest.mark.gpu
def test_a_gpu_is_named():
    found = describe_device(torch.device("cuda", 0))
    assert found["name"] == torch.cuda.get_device_name(0)
    assert found["memory_bytes"] > 2**30


def test_packages_that_are_not_installed_have_no_version():
    assert list(installed(("torch", "no-such-package"))) == ["torch"]


def test_each_start_of_a_run_is_kept(tmp_path):
    known = {"git": None, "device": {}, "platform": "Linux", "python": "3.11", "packages": {"torch": "2"}}
    record(tmp_path, known | {"started_at": "first"})
    record(tmp_path, known | {"started_at": "second"})
    starts = json.loads((tmp_path / ENVIRONMENT).read_text())
    assert [start["started_at"] for start in starts] == ["first", "second"]
