"""From a config and a SFT model to the RL module, or to an error that says what they lack."""

import json
import re
import shutil
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_rlkv.callbacks.mismatch import DenseMismatch
from lit_rlkv.config import ConfigError
from lit_rlkv.runs import memory
from lit_rlkv.runs import policy as training
from lit_rlkv.runs.checkpoint import load_trainable, trainable_weights
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import REWARD_HEAD, REWARD_MODEL
from lit_rlkv.stages import evaluation as reward
from lit_rlkv.stages.rl import train_policy
from lit_rlkv.stages.sft import run_sft
from tests.whole_runs import MODEL, composed

TINY = [*MODEL, "experiment=none"]


def config(folder, *overrides):
    return checked_config(composed(*TINY, f"runs_dir={folder}", *overrides))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def joint(runs):
    return run_sft(Run(config(runs, "sft.n_steps=10")), [])


@pytest.fixture(scope="module")
def apart(runs):
    return run_sft(Run(config(runs, "sft.n_steps=10", "sft.joint=false", "roles=dynamic_lora")), [])


def policy(runs, start, *overrides):
    """Overrides of a run without an SFT stage."""
    return make_policy(Run(config(runs, "stages=[rl]", f"model.path={start}", *overrides)), start)


def test_a_budget_profile_must_fit_the_model_at_every_budget_of_the_run(runs, joint):
    options = ["cache.budget_profile=[9,3]", "cache.budget=6", "cache.window=1", "evaluation.budgets=[]"]
    policy(runs, joint, *options)
    for more, says in (
        ("cache.budget_profile=[9,3,6]", "each layer without a window, and the model has 2; change it"),
        ("evaluation.budgets=[4]", r"sink . window . 1 = 3 keys, got \[6, 2\]"),
        ("cache.target_overlap=0.86", r"sink . window . 1 = 3 keys, got \[5, 1\]"),
    ):
        with pytest.raises(ConfigError, match=says):
            policy(runs, joint, *options, more, "diagnostics=light", "distillation=none")


def test_a_policy_that_reads_what_the_model_lacks_is_refused_before_any_work(runs, joint, monkeypatch):
    weighs = ["cache.policy=h2o", "+cache.policy_options.value_norms=true"]
    policy(runs, joint, *weighs)
    monkeypatch.setattr("lit_rlkv.runs.policy.rope_frequencies", lambda model: None)
    with pytest.raises(ConfigError, match=r"model: cache\.policy=triattention needs RoPE"):
        policy(runs, joint, "cache.policy=triattention")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "is_sharded", True)
        with pytest.raises(ConfigError, match=r"o_proj.* FSDP shards it"):
            policy(runs, joint, *weighs)
    monkeypatch.setattr("lit_rlkv.runs.policy.output_projections", lambda model: ())
    with pytest.raises(ConfigError, match=r"model: cache\.policy=h2o weighs values .* leave cache\.policy"):
        policy(runs, joint, *weighs)


def test_codes_that_do_not_fit_in_bytes_are_refused_before_any_work(runs, joint, monkeypatch):
    policy(runs, joint, "cache.dtype=int4")
    monkeypatch.setattr("lit_rlkv.runs.policy.head_dims", lambda model: {8, 7})
    policy(runs, joint, "cache.dtype=int8")
    with pytest.raises(ConfigError, match=r"cache\.dtype=int4 .* heads have 7 dimensions; use int8 or fp8"):
        policy(runs, joint, "cache.dtype=int4")


def test_only_the_roles_that_something_reads_are_needed(runs):
    def needed(*overrides):
        return config(runs, *overrides).needed_roles

    assert needed() == set()
    assert needed("algorithm.kl.weight=0.1") == {"reference"}
    assert needed("distillation=sparse_student") == {"reference"}
    assert needed("distillation=dense_student") == set()
    assert needed("algorithm=ppo", "algorithm.kl.weight=0") == {"value"}
    assert needed("algorithm=online_dpo", "reward=mixed") == {"reference", "reward"}


def test_a_reward_model_of_its_own_is_the_critics_backbone(runs, apart):
    module = policy(
        runs, apart, "algorithm=ppo", "reward=learned", "roles=dynamic_lora", "roles.value_init=reward"
    )
    actor, critic = (module.roles.backbone(role).state_dict() for role in ("policy", "value"))
    name = "model.layers.0.self_attn.q_proj.base_layer.weight"
    saved = load_file(apart / REWARD_MODEL / "model.safetensors")[name.replace(".base_layer", "")]
    assert torch.equal(critic[name], saved)
    assert not torch.equal(critic[name], actor[name])
    head = load_file(apart / REWARD_MODEL / REWARD_HEAD)
    assert torch.equal(module.roles.head("value").linear.weight, head["linear.weight"])


def test_the_value_head_starts_from_the_configured_role(runs, joint):
    zero = policy(runs, joint, "algorithm=ppo")
    assert zero.roles.head("value").linear.weight.abs().max() == 0
    policy_module = policy(runs, joint, "algorithm=ppo", "roles.value_init=reward")
    assert torch.equal(
        policy_module.roles.head("value").linear.weight, load_file(joint / REWARD_HEAD)["linear.weight"]
    )


def test_the_critic_may_learn_at_a_rate_of_its_own(runs, joint):
    module = policy(
        runs, joint, "algorithm=ppo", "algorithm.loss.value_lr_scale=20", "algorithm.n_warmup_steps=1"
    )
    optimizer = module.configure_optimizers()["optimizer"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5e-3, 0.01]  # the first of two steps up
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert grouped == {id(p) for p in module.parameters() if p.requires_grad}


def test_the_critic_sees_what_the_config_says(runs, joint):
    def sees_shadow(*overrides):
        return policy(runs, joint, "algorithm=ppo", *overrides).value_shadow

    assert sees_shadow()
    assert not sees_shadow("roles.value_view=dense")
    assert sees_shadow("roles.value_view=shadow", "correction=naive")
    # where nothing is evicted both views are one, and the critic takes the policy's to share its forward
    assert sees_shadow("roles.value_view=dense", "correction=dense")


@pytest.mark.parametrize("layout", ["hydra", "j_hydra"])
def test_one_backbone_contradicts_a_reward_model_with_its_own_weights(runs, apart, layout):
    with pytest.raises(
        ConfigError, match=f"roles.layout={layout} has one backbone for policy and critics, but"
    ):
        policy(runs, apart, "algorithm=ppo", f"roles={layout}")


def test_a_warm_model_without_a_reward_head_is_refused(runs, joint, tmp_path):
    shutil.copytree(joint, tmp_path / "bare")
    (tmp_path / "bare" / REWARD_HEAD).unlink()
    with pytest.raises(ConfigError, match="the reward role needs a trained reward head"):
        policy(runs, tmp_path / "bare", "reward=learned")
    with pytest.raises(ConfigError, match=re.escape("roles.value_init=reward starts the critic from the")):
        policy(runs, tmp_path / "bare", "algorithm=ppo", "roles.value_init=reward")


def test_a_reward_head_of_another_size_is_refused(runs, joint, tmp_path):
    shutil.copytree(joint, tmp_path / "odd")
    save_file(
        {"linear.weight": torch.zeros(1, 7), "linear.bias": torch.zeros(1)}, tmp_path / "odd" / REWARD_HEAD
    )
    with pytest.raises(
        ConfigError, match="the reward head does not fit a Qwen3ForCausalLM with hidden size 32"
    ):
        policy(runs, tmp_path / "odd", "reward=learned")


def test_an_adapter_of_another_rank_or_layout_is_refused(runs, joint):
    trained = trainable_weights(policy(runs, joint))
    with pytest.raises(ValueError, match=r"give the model and the roles\.rank"):
        load_trainable(policy(runs, joint, "roles.rank=4"), trained)
    with pytest.raises(ValueError, match="the checkpoint must hold this model's trained parameters"):
        load_trainable(policy(runs, joint, "roles=j_hydra"), trained)


def test_a_run_holds_one_backbone_also_while_its_reward_head_is_judged(runs, joint, monkeypatch):
    loaded = []
    monkeypatch.setattr(training, "load_backbone", counting(loaded, training.load_backbone))
    monkeypatch.setattr(reward, "load_backbone", counting(loaded, reward.load_backbone))
    cfg = config(runs, "stages=[eval]", f"model.path={joint}", "algorithm=ppo")
    parts = Run(cfg)
    module = make_policy(parts, joint)
    assert reward.report_on_reward(parts, module.roles, joint).n_pairs == 16
    assert len(loaded) == 1


def counting(calls, function):
    def counted(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return counted


def test_rl_refuses_to_resume_with_other_rows(joint, tmp_path):
    path = tmp_path / "sums.jsonl"

    def train(n_rows, n_iterations):
        rows = [{"prompt": f"{n}+0=", "answer": f"{n}"} for n in range(n_rows)]
        path.write_text("\n".join(map(json.dumps, rows)))
        asked = ["task=jsonl", f"task.path={path}", "stages=[rl]", f"model.path={joint}"]
        cfg = config(tmp_path, *asked, f"algorithm.n_iterations={n_iterations}")
        parts = Run(cfg, folder=tmp_path)
        train_policy(parts, make_policy(parts, joint), [])
        return parts.checkpoints.latest().iteration

    assert train(40, 1) == 1
    with pytest.raises(
        ConfigError, match=r"iteration-000001: the rows of .* have changed .* start a new run"
    ):
        train(41, 2)
    assert train(40, 2) == 2


def test_diagnostics_read_no_more_tokens_at_a_time_than_the_learner(joint, tmp_path):
    asked = ["stages=[rl]", f"model.path={joint}", "algorithm.n_iterations=1", "fabric.tokens_per_pass=100"]
    parts = Run(config(tmp_path, *asked), folder=tmp_path)
    large, small = DenseMismatch(), DenseMismatch(tokens_per_pass=50)
    module = make_policy(parts, joint)
    for diagnostic in (large, small):
        diagnostic.on_fit_start(None, module)
    train_policy(parts, module, [large, small])
    assert (large.tokens_per_pass, small.tokens_per_pass) == (100, 50)


def test_bytes_of_passes_are_counted_once(joint, tmp_path):
    asked = ["stages=[rl]", f"model.path={joint}", "algorithm.n_iterations=1"]
    parts = Run(config(tmp_path, *asked), folder=tmp_path)
    with patch.object(memory, "PassBytes", wraps=memory.PassBytes) as count:
        train_policy(parts, make_policy(parts, joint), [])
    assert count.call_count == 1
