"""Tests of the scorer's file: in a folder, and beside a model of the hub."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from lit_rlkv.models.kv_scorer import KV_SCORER_FILE, read_kv_scorer, save_kv_scorer
from lit_rlkv.models.model_files import find_file


def in_cache_of_hub(folder: Path, name: str) -> Path:
    """Make the folder of a model as the hub's client has it after a download."""
    model = folder / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_model_of_the_hub_brings_its_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    weights = {"layers.0.age": torch.ones(2)}
    save_kv_scorer(weights, in_cache_of_hub(tmp_path, "me/scored"))
    in_cache_of_hub(tmp_path, "me/plain")
    found = read_kv_scorer("me/scored")
    assert found is not None
    assert torch.equal(found["layers.0.age"], weights["layers.0.age"])
    assert read_kv_scorer("me/plain") is None


def test_a_folder_brings_its_scorer(tmp_path: Path):
    assert find_file(tmp_path, KV_SCORER_FILE) is None
    save_kv_scorer({"layers.0.age": torch.ones(2)}, tmp_path)
    assert find_file(tmp_path, KV_SCORER_FILE) == tmp_path / "kv_scorer.safetensors"
