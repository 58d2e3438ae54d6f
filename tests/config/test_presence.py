import os

import pytest

from tests.config.asking import asked, refusal


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["task=jsonl"], "task.path"),
        (["task=dataset"], "task.dataset"),
        (["task=preferences", "reward=learned"], "task.path"),
        (["reward=python"], "reward.functions.custom.path"),
        (["reward=command"], "reward.functions.custom.argv"),
        (["reward=endpoint"], "reward.functions.custom.url"),
    ],
)
def test_a_key_without_default_is_asked_for_by_name(overrides, key):
    assert refusal(*overrides) == f"{key} is not given; add {key}=..."


def test_a_key_that_the_preset_leaves_open_is_asked_for_by_name():
    assert refusal("recipe=llm") == "recipe=llm needs model.path, which is not given; add model.path=..."


def test_all_that_is_not_given_is_named_at_once():
    says = refusal("task=jsonl", "reward=python")
    assert says.startswith("reward.functions.custom.path, task.path are not given; add")
    assert says.endswith("add reward.functions.custom.path=... task.path=...")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "resume=true",
            "resume must be the folder of a run, got true; give resume=runs/NAME, or resume=auto",
        ),
        ("resume=''", "resume must be the folder of a run, got ''; give resume=runs/NAME, or resume=auto"),
        ("runs_dir=null", "runs_dir must be a folder, got null; give one, such as runs_dir=runs"),
        ("runs_dir='~/runs'", "runs_dir=~/runs: ~ is not expanded here; give /"),
        ("resume='~/runs/x'", "resume=~/runs/x: ~ is not expanded here; give /"),
        (
            "fabric.n_threads=0",
            "fabric.n_threads must be a whole number of at least 1 and at most 1024 or null, got 0",
        ),
        (
            "fabric.n_threads=abc",
            "fabric.n_threads must be a whole number of at least 1 and at most 1024 or null, got abc",
        ),
        ("~distillation", "~distillation takes away what every run reads; write distillation=none"),
        ("~reward", "~reward takes away what every run reads; write reward=..."),
        ("~sft.n_steps", "~sft.n_steps takes away what every run reads; write sft.n_steps=..."),
    ],
)
def test_removing_a_needed_key_is_refused(override, says):
    assert refusal(override).startswith(says)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    said = refusal(f"runs_dir={tmp_path}/file/runs")
    assert said.startswith(f"runs_dir={tmp_path}/file/runs cannot be made, since {tmp_path}/file is a file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    said = refusal(f"runs_dir={tmp_path}/a/b")
    assert said.startswith(
        f"runs_dir={tmp_path}/a/b cannot be made, since nothing can be written in {tmp_path};"
    )


def test_optional_keys_may_be_removed():
    asked("~debug")
    asked("~diagnostics.gradient")
    asked("~correction.weight_fn.cap", "experiment=tis")
    asked("fabric.n_threads=2", "resume=auto")
