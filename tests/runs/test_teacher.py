"""The teacher of `distillation=teacher`: what a run takes for one, and what it refuses before any work."""

from pathlib import Path
from shutil import copyfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_rlkv.callbacks.model_distillation import ModelDistillation
from lit_rlkv.config import ConfigError
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.runs.memory import _card
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.teacher import load_teacher
from tests.saved_models import change_json, chat_tokenizer, save_checkpoint, save_model
from tests.whole_runs import config, rows_of, run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of another family and size than the policy, with 13 tokens of padding."""
    return save_checkpoint(tmp_path_factory.mktemp("models") / "teacher")


def taught(tmp_path, model, *overrides):
    options = ["experiment=shadow", "distillation=teacher", f"distillation.model={model}", *overrides]
    return Run(config(tmp_path, *options))


def test_a_teacher_is_frozen_and_counts_as_memory(tmp_path, checkpoint):
    context = taught(tmp_path, checkpoint, "distillation.dtype=bfloat16")
    before = _card(context).memory
    load_teacher(context)
    teacher = context.cfg.parts.distillation.teacher
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}
    n_bytes = sum(2 * parameter.numel() for parameter in teacher.parameters())
    assert before - _card(context).memory == n_bytes > 0


def test_no_teacher_is_loaded_without_rl(tmp_path):
    context = taught(tmp_path, "/nowhere", "stages=[sft]")
    load_teacher(context)
    assert context.cfg.parts.distillation.teacher is None


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path):
    other = save_checkpoint(tmp_path / "other", tokenizer=chat_tokenizer())
    says = "must have the policy's tokenizer, .* 1 tokens differ, such as '<turn>' .None here, 51 there."
    with pytest.raises(ConfigError, match=says):
        load_teacher(taught(tmp_path, other))


def test_a_teacher_with_fewer_tokens_than_the_policy_is_refused(tmp_path, checkpoint):
    small = save_model(tmp_path / "small", tiny_qwen3(len(build_task_tokenizer()), 0, 1))
    options = ["stages=[rl]", f"model.path={checkpoint}"]
    with pytest.raises(ConfigError, match="must have logits of at least the policy's 64 tokens, got 51"):
        load_teacher(taught(tmp_path, small, *options))
    load_teacher(taught(tmp_path, checkpoint, *options))


def test_a_teacher_too_short_for_the_responses_is_refused(tmp_path):
    short = save_checkpoint(tmp_path / "short", max_position_embeddings=8)
    with pytest.raises(ConfigError, match=r"distillation\.model: .* has positions for 8"):
        load_teacher(taught(tmp_path, short))


def test_a_dense_rollout_may_be_taught_too(tmp_path, checkpoint):
    options = ["experiment=dense", "distillation=teacher", f"distillation.model={checkpoint}"]
    assert isinstance(config(tmp_path, *options).parts.distillation, ModelDistillation)


@pytest.mark.slow
def test_a_resumed_run_is_taught_the_same(tmp_path, checkpoint):
    options = [f"distillation.model={checkpoint}", "algorithm.lr_schedule=constant", "stages=[sft,rl]"]
    options = ["experiment=shadow", "distillation=teacher", *options, "callbacks.samples_every=9"]
    run(tmp_path, "straight", *options, "algorithm.n_iterations=4")
    run(tmp_path, "resumed", *options, "algorithm.n_iterations=2")
    run(tmp_path, "resumed", *options, "algorithm.n_iterations=4", resumes=True)
    straight, resumed = (rows_of(tmp_path / name) for name in ("straight", "resumed"))
    assert len(straight) == 4
    assert float(straight[0]["teacher/kl"]) > 0.01
    for name in ("loss", "teacher/kl", "teacher/loss", "grad_norm"):
        assert [row[name] for row in straight] == [row[name] for row in resumed]


def test_a_changed_teacher_or_tokenizer_ends_a_resume_and_a_changed_reward_costs_a_warning(tmp_path, caplog):
    teacher, model = (save_checkpoint(tmp_path / name) for name in ("other", "start"))
    reward = Path(copyfile("tests/data/rewards.py", tmp_path / "rewards.py"))
    options = ["experiment=shadow", "distillation=teacher", f"distillation.model={teacher}", "stages=[rl]"]
    options += [f"model.path={model}", "reward=python", f"reward.functions.custom.path={reward}:has_one"]
    options += ["diagnostics=none", "algorithm.lr_schedule=constant"]
    run(tmp_path, "run", *options, "algorithm.n_iterations=1")
    reward.write_text(reward.read_text().replace('"1"', '"2"'))
    run(tmp_path, "run", *options, "algorithm.n_iterations=2", resumes=True)
    assert "reward.functions.custom has changed since the run trained with it" in caplog.text
    again = [*options, "algorithm.n_iterations=3"]
    tokenizer = model / "tokenizer_config.json"
    kept = tokenizer.read_text()
    change_json(tokenizer, model_max_length=77)
    with pytest.raises(ConfigError, match=r"^config and tokenizer of model\.path has changed since the run"):
        run(tmp_path, "run", *again, resumes=True)
    tokenizer.write_text(kept)
    weights = {name: 2 * value for name, value in load_file(teacher / "model.safetensors").items()}
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"^distillation\.model has changed since .* restore it, or"):
        run(tmp_path, "run", *again, resumes=True)
