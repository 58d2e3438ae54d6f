"""Expert routing through the config: runs on checkpoints of mixtures of experts, in float32 and bfloat16."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.routing import routers_of
from lit_rlkv.planning.needs import rollout_needs
from lit_rlkv.runs.policy import load_backbone, make_policy
from lit_rlkv.runs.run import Run
from lit_rlkv.types import Record
from tests.models_zoo import MOE_FAMILIES
from tests.saved_models import save_checkpoint
from tests.test_model_families import rolled_out
from tests.tiers import short_tier
from tests.whole_runs import TINY, config, rows_of, run, run_on_ranks

ROOT = Path(__file__).parents[1]
LIGHT = ["stages=[rl]", "diagnostics=none", "roles.rank=4"]
REPLAYED = "rollout.replay_routing=true"


def metrics_of(folder, name, checkpoint, *overrides):
    """The rows of a run, by iteration."""
    run(folder, name, *LIGHT, f"model.path={checkpoint}", *overrides)
    return numbers_of(folder / name)


def numbers_of(folder):
    return [{key: float(value) for key, value in row.items() if value} for row in rows_of(folder)]


@pytest.mark.parametrize("family", short_tier(MOE_FAMILIES, ["deepseek_v2"]))
def test_a_checkpoint_of_every_family_is_rolled_out_replayed_and_updated(family, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", family)
    options = [REPLAYED, "algorithm.n_iterations=2", "algorithm.kl.weight=0.1"]
    for row in metrics_of(tmp_path, "run", checkpoint, *options):
        assert row["kv/replay_gap"] < 1e-4
        assert row["grad_norm"] > 0


def test_recomputed_layers_and_a_critic_give_the_same_update(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", "mixtral")
    options = [REPLAYED, "algorithm=ppo", "algorithm.n_iterations=1", "roles.target_modules=[q_proj,v_proj]"]
    (plain,) = metrics_of(tmp_path, "plain", checkpoint, *options)
    (again,) = metrics_of(tmp_path, "again", checkpoint, *options, "roles.gradient_checkpointing=true")
    for name in ("loss", "grad_norm", "kv/replay_gap", "value_loss"):
        assert again[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name


AT_ONCE = [
    REPLAYED,
    "rollout.top_p=0.9",
    "rollout.max_rows=4",  # fewer than the responses, so that rows are reused
    "fabric.tokens_per_pass=48",
    "roles.gradient_checkpointing=true",
    "roles.target_modules=[q_proj,v_proj]",
    "algorithm.kl.weight=0.1",
]


def test_experts_and_sampling_masks_are_replayed_together(tmp_path, monkeypatch):
    checkpoint = save_checkpoint(tmp_path / "model", "mixtral")
    options = [
        *AT_ONCE,
        "algorithm=ppo",
        "algorithm.n_iterations=1",
        "rollout.n_prompts=4",
        "distillation=none",
    ]
    (row,) = metrics_of(tmp_path, "run", checkpoint, *options)
    assert 0 < row["kv/replay_gap"] < 1e-4
    assert min(row[f"kv/recorded_bytes/{name}"] for name in ("expert_ids", "sampling_masks")) > 0

    view = Record.view

    def of_the_token_before(*arguments, **options):
        found = view(*arguments, **options)
        return replace(found, expert_ids=found.expert_ids.roll(1, dims=-1))

    monkeypatch.setattr(Record, "view", of_the_token_before)
    (wrong,) = metrics_of(tmp_path, "wrong", checkpoint, *options)
    assert wrong["kv/replay_gap"] > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [[], ["fabric.strategy=fsdp2", "fabric.accelerator=cpu"]], ids=str)
def test_two_processes_compute_the_updates_of_one(strategy, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", "mixtral")
    one = metrics_of(tmp_path, "one", checkpoint, *AT_ONCE, "rollout.n_shards=2")
    run_on_ranks(tmp_path, "two", 2, *LIGHT, f"model.path={checkpoint}", *AT_ONCE, *strategy)
    two = numbers_of(tmp_path / "two")
    for ours, theirs in zip(one, two, strict=True):
        assert max(row["kv/replay_gap"] for row in (ours, theirs)) < 1e-4
        assert ours["grad_norm"] > 1e-2
        for name in ("loss", "grad_norm", "entropy", "kl", "smd/kl", "completions/mean_length"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-6), name


@pytest.mark.slow
def test_compiled_layers_record_the_experts_that_are_replayed(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", "mixtral")
    options = [*LIGHT, *AT_ONCE, "algorithm=ppo", "rollout.compile_layers=true", f"model.path={checkpoint}"]
    # In another process, because torch.compile cannot trace the type checks of the test run.
    command = [sys.executable, "-m", "lit_rlkv.fit", *TINY, *options, f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = numbers_of(tmp_path / "run")
    assert 0 < first["kv/replay_gap"] < 1e-4
    assert 0 < second["kv/replay_gap"] < 1e-4  # other weights
    assert second["kv/recorded_bytes/expert_ids"] > 0


@pytest.mark.slow
def test_a_learned_reward_and_gradients_by_parts_go_with_all_records(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", "mixtral")
    options = [
        "algorithm=ppo",
        "stages=[sft,rl,eval]",
        "reward=mixed",
        "algorithm.n_minibatches=2",
        "algorithm.n_epochs=2",
    ]
    options += ["diagnostics=default", *(f"diagnostics.{name}.every=1" for name in ("gradient", "mismatch"))]
    for row in metrics_of(tmp_path, "run", checkpoint, *AT_ONCE, *options):
        assert 0 < row["kv/replay_gap"] < 1e-4
        assert row["gradient/policy/variance"] > 0
        assert row["reward_std"] > 0
    after = json.loads((tmp_path / "run" / "evaluation.json").read_text())["after"]
    assert max(row["replay_gap"] for row in after) < 1e-4


@pytest.mark.slow
def test_in_bfloat16_the_replay_gap_is_smaller_with_the_experts_of_the_sampler(tmp_path):
    checkpoint = save_checkpoint(
        tmp_path / "model", "mixtral", num_local_experts=64, num_experts_per_tok=8, num_hidden_layers=6
    )
    half = ["fabric.precision=bf16-true", "algorithm.n_iterations=1", "correction.bypass_mode=false"]
    (chosen,) = metrics_of(tmp_path, "chosen", checkpoint, *half)
    (replayed,) = metrics_of(tmp_path, "replayed", checkpoint, *half, REPLAYED)
    # the sampler is the same, so the two differ by the experts alone
    assert replayed["reward"] == chosen["reward"]
    for name in ("kv/replay_gap", "kv/replay_gap_mean", "kv/replay_gap_p99"):
        assert 2 * replayed[name] < chosen[name], name


def test_a_dense_model_is_refused_when_it_is_loaded(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model")
    context = Run(config(tmp_path, *LIGHT, f"model.path={checkpoint}", REPLAYED))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no routing to replay") as e:
        load_backbone(context, checkpoint)
    assert "\n" not in str(e.value)
    load_backbone(Run(config(tmp_path, *LIGHT, f"model.path={checkpoint}")), checkpoint)


def test_the_bytes_of_the_record_are_a_need_of_a_rollout(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model", "mixtral")
    context = Run(config(tmp_path, *LIGHT, f"model.path={checkpoint}", REPLAYED))
    module = make_policy(context, checkpoint)
    rollout = rolled_out(context, module, ["1+2="], record_routing=True)
    settings = context.cfg.rollout
    n_rows, n_columns = len(rollout.input_ids), int(rollout.input_ids.shape[1])
    with acting_as(module.roles, "policy") as backbone:
        needs = rollout_needs(
            backbone, context.cfg.parts.cache, (1, n_columns - settings.max_new_tokens), settings, n_rows
        )
        assert len(routers_of(backbone)) == 3
    # the decoder's buffer, and the rollout
    assert needs["record of experts"] == 2 * rollout.record.expert_ids.nbytes
