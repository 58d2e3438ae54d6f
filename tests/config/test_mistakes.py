"""Mistakes of people who know TRL, transformers, verl or Lightning, and the key that each error names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose
from omegaconf import OmegaConf

from lit_rlkv.config import ConfigError, check_command_line, parse_config
from lit_rlkv.config.aliases import DIFFERENT, SAME
from lit_rlkv.config.composing import (
    groups,
    hint_at,
    initialized,
    keys_of_options,
    known_keys,
    options_of,
)
from tests.config.asking import refusal

ROOT = Path(__file__).parents[2]
OF_TRL = {
    "num_generations": "algorithm.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "beta": "algorithm.kl.weight",
    "num_iterations": "algorithm.n_epochs",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "scale_rewards": "algorithm.advantage.estimator",
    "loss_type": "algorithm.aggregation",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "missing_eos_penalty": "reward.missing_eos_penalty",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
    "reward_model_path": "reward=learned",
    "steps_per_generation": "algorithm.n_minibatches",
    "generation_batch_size": "rollout.n_prompts",
    "importance_sampling_level": "algorithm.loss.importance_sampling_level",
    "delta": "algorithm.loss.delta",
    "entropy_coef": "algorithm.entropy_coef",
    "top_entropy_quantile": "algorithm.advantage.top_entropy_quantile",
    "use_bias_correction_kl": "algorithm.kl.bias_correction",
    "sync_ref_model": "algorithm.reference_sync.every",
    "ref_model_sync_steps": "algorithm.reference_sync.every",
    "ref_model_mixup_alpha": "algorithm.reference_sync.alpha",
    "vllm_importance_sampling_mode": "correction=sequence_mis",
    "vllm_importance_sampling_clip_max": "correction.weight_fn.high",
    "vllm_importance_sampling_correction": "correction=tis",
    "vllm_importance_sampling_cap": "correction.weight_fn.cap",
    "use_vllm": "cache.policy",
    "log_completions": "callbacks.samples_every",
    "num_completions_to_print": "callbacks.n_samples",
    "num_ppo_epochs": "algorithm.n_epochs",
    "num_mini_batches": "algorithm.n_minibatches",
    "cliprange_value": "algorithm.loss.value_clip",
    "vf_coef": "algorithm.loss.value_weight",
    "whiten_rewards": "reward.normalize=batch",
    "kl_coef": "algorithm.kl.weight",
    "dataset_name": "task.dataset",
    "dataset_train_split": "task.split",
    "dataset_test_split": "task.eval_split",
    "use_peft": "roles.layout",
    "lora_r": "roles.rank",
    "lora_alpha": "roles.alpha",
    "lora_target_modules": "roles.target_modules",
    "load_in_4bit": "fabric.quantization=4bit",
}
OF_TRANSFORMERS = {
    "output_dir": "hydra.run.dir",
    "model_name_or_path": "model.path",
    "torch_dtype": "fabric.precision",
    "per_device_train_batch_size": "rollout.n_prompts",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "gradient_accumulation_steps": "fabric.tokens_per_pass",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas",
    "optim": "optimizer._target_",
    "max_grad_norm": "algorithm.max_grad_norm",
    "num_train_epochs": "algorithm.n_iterations",
    "max_steps": "algorithm.n_iterations",
    "lr_scheduler_type": "algorithm.lr_schedule",
    "warmup_steps": "algorithm.n_warmup_steps",
    "warmup_ratio": "algorithm.n_warmup_steps",
    "bf16": "fabric.precision=bf16-mixed",
    "fp16": "fabric.precision=16-mixed",
    "gradient_checkpointing": "roles.gradient_checkpointing",
    "logging_steps": "callbacks.samples_every",
    "report_to": "logger=wandb",
    "run_name": "hydra.run.dir=runs/NAME",
    "save_steps": "callbacks.checkpoint_every",
    "save_total_limit": "callbacks.keep_last",
    "metric_for_best_model": "callbacks.best_metric",
    "load_best_model_at_end": "callbacks.keep_best",
    "eval_steps": "stages=[sft,rl,eval]",
    "eval_strategy": "stages=[sft,rl,eval]",
    "data_seed": "seed",
    "use_cpu": "fabric.accelerator=cpu",
    "fsdp": "fabric.strategy=fsdp2",
    "deepspeed": "fabric.strategy=fsdp2",
    "resume_from_checkpoint": "resume",
    "trust_remote_code": "trusted_modules",
}
OF_VERL = {
    "data.train_batch_size": "rollout.n_prompts",
    "data.train_files": "task.dataset",
    "data.val_files": "task.eval_split",
    "data.prompt_key": "task.prompt_column",
    "data.max_response_length": "rollout.max_new_tokens",
    "algorithm.adv_estimator": "algorithm=grpo",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.lam": "algorithm.advantage.lam",
    "algorithm.use_kl_in_reward": "algorithm.kl.place=reward",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.weight",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage.estimator",
    "algorithm.filter_groups.enable": "algorithm.advantage.filter_zero_std_groups",
    "algorithm.rollout_is": "correction=sequence_tis",
    "algorithm.rollout_correction.rollout_is_threshold": "correction.weight_fn.cap",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm=gspo",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.loss.delta",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.lora_rank": "roles.rank",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "roles.gradient_checkpointing",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.name": "cache.policy",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "cache.policy",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "fabric.tokens_per_pass",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "algorithm.n_warmup_steps",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.n_minibatches",
    "algorithm.n_micro_batches": "fabric.tokens_per_pass",
    "rollout.rows_per_pass": "fabric.tokens_per_pass",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "fabric.tokens_per_pass",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.n_epochs",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.loss.clip_high",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl.place=loss",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.weight",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.grad_clip": "algorithm.max_grad_norm",
    "critic.model.path": "roles.layout",
    "critic.optim.lr": "algorithm.loss.value_lr_scale",
    "reward_model.model.path": "reward=learned",
    "custom_reward_function.path": "reward.functions.custom.path",
    "trainer.total_epochs": "algorithm.n_iterations",
    "trainer.total_training_steps": "algorithm.n_iterations",
    "trainer.critic_warmup": "algorithm.critic_warmup",
    "trainer.n_gpus_per_node": "fabric.devices",
    "trainer.nnodes": "fabric.num_nodes",
    "trainer.save_freq": "callbacks.checkpoint_every",
    "trainer.test_freq": "stages=[sft,rl,eval]",
    "trainer.logger": "logger=wandb",
    "trainer.project_name": "logger.project",
    "trainer.experiment_name": "hydra.run.dir",
    "trainer.default_local_dir": "runs_dir",
    "trainer.resume_mode": "resume=auto",
}
OF_LIGHTNING = {
    "max_epochs": "algorithm.n_iterations",
    "trainer.max_epochs": "algorithm.n_iterations",
    "trainer.max_steps": "algorithm.n_iterations",
    "trainer.devices": "fabric.devices",
    "accelerator": "fabric.accelerator",
    "strategy": "fabric.strategy",
    "num_nodes": "fabric.num_nodes",
    "precision": "fabric.precision",
    "accumulate_grad_batches": "fabric.tokens_per_pass",
    "gradient_clip_val": "algorithm.max_grad_norm",
    "val_check_interval": "stages=[sft,rl,eval]",
    "check_val_every_n_epoch": "stages=[sft,rl,eval]",
    "limit_val_batches": "evaluation.n_prompts",
    "log_every_n_steps": "callbacks.samples_every",
    "default_root_dir": "runs_dir",
    "fast_dev_run": "debug=fast",
    "save_top_k": "callbacks.keep_best",
    "ckpt_path": "resume",
}
OF_NOBODY = {
    "batch_size": "rollout.n_prompts",
    "dataset": "task.dataset",
    "wandb": "logger=wandb",
    "epochs": "algorithm.n_iterations",
    "lr": "optimizer.lr",
    "tokenizer": "model.path",
    "gpus": "fabric.devices",
    "budget": "cache.budget",
    "policy": "cache.policy",
    "compression_ratio": "cache.budget",
}
MISTAKES = [
    (key, meant)
    for table in (OF_TRL, OF_TRANSFORMERS, OF_VERL, OF_LIGHTNING, OF_NOBODY)
    for key, meant in table.items()
]
QUOTED = re.compile(r"'([^' ]+)'")


@pytest.mark.parametrize(("key", "meant"), MISTAKES)
def test_a_key_of_another_package_leads_to_the_one_that_is_meant(key, meant):
    with initialized():
        said = hint_at(key, "config")
    assert meant in said
    assert "\n" not in said
    assert len(said) < 260


def test_errors_of_the_command_line_are_these_hints():
    with initialized():
        expected = hint_at("max_steps", "config")
    assert refusal("max_steps=10") == f"unknown key 'max_steps': {expected}"


def test_every_key_that_a_hint_names_exists():
    with initialized():
        known = {*known_keys("config"), *keys_of_options(), *groups(), "hydra.run.dir", "optimizer.eps"}
        programs = known | known_keys("evaluate") | known_keys("export")
    assert [key for key in SAME.values() if key not in programs] == []
    named = {quoted for said in DIFFERENT.values() for quoted in QUOTED.findall(said)}
    assert len(named) > 50
    assert [one for one in named if one.lstrip("+").partition("=")[0] not in known] == []


def test_every_setting_that_a_hint_names_is_accepted():
    settings = {one for said in DIFFERENT.values() for one in QUOTED.findall(said) if "=" in one}
    settings = {one for one in settings if not re.search("[A-Z]{4}", one) and one[0] != "+"}
    chosen = {one for one in settings if one.partition("=")[0] in groups()}
    for setting in chosen:
        group, _, option = setting.partition("=")
        assert option in options_of(group), setting
    with initialized():
        cfg = compose("config", overrides=["diagnostics=none"])  # some cannot be measured under fsdp2
    for setting in settings - chosen - {"fabric.quantization=4bit"}:  # this one needs a checkpoint
        parse_config(OmegaConf.merge(cfg, OmegaConf.from_dotlist([setting])))


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("config", ["--seed", "3"], "write seed=3"),
        ("config", ["--seed=3"], "write seed=3"),
        ("config", ["--max_steps", "10"], "'algorithm.n_iterations' counts iterations"),
        ("config", ["--learning-rate", "1e-5"], "write optimizer.lr=1e-5"),
        ("config", ["--gradient_checkpointing"], "write roles.gradient_checkpointing=true"),
        ("config", ["--config-name=x"], "choose by group=option, such as experiment=smd"),
        ("config", ["help"], "write --help"),
        ("config", ["wandb"], "write logger=wandb"),
        ("config", ["tis"], "write experiment=tis or correction=tis"),
        ("config", ["Qwen/Qwen2.5-0.5B"], "such as model.path=Qwen/Qwen2.5-0.5B"),
        ("config", ["model=Qwen/Qwen2.5-0.5B"], "is model.path=Qwen/Qwen2.5-0.5B"),
        ("config", ["task=data/mine.jsonl"], "task=dataset task.dataset=data/mine.jsonl"),
        ("config", ["algorithm=grop"], "did you mean algorithm=grpo?"),
        ("config", ["optimizer=sgd"], "optimizer._target_=torch.optim.NAME"),
        ("evaluate", ["runs/x"], "write ckpt=runs/x"),
        ("evaluate", ["--ckpt", "runs/x"], "write ckpt=runs/x"),
        ("evaluate", ["model=runs/x"], "did you mean 'ckpt'?"),
        ("evaluate", ["budget=3"], "did you mean 'budgets'?"),
        ("export", ["runs/x", "out"], "write ckpt=runs/x to=out"),
        ("export", ["ckpt=runs/x", "output_dir=out"], "did you mean 'to'?"),
    ],
)
def test_a_command_line_in_another_form_is_translated(program, arguments, says):
    with pytest.raises(ConfigError) as caught:
        check_command_line(program, arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cache=snapkv", "set these one by one, such as cache.policy=snapkv"),
        ("algorithm.kl=0.1", "such as algorithm.kl.weight=0.1"),
        ("optimizer.lr=0", "optimizer.lr must be a number above 0, got 0"),
        ("sft.optimizer.lr=0.0", "sft.optimizer.lr must be a number above 0, got 0.0"),
        (
            "optimizer.lr=1e31",
            "a number above 0 and of at most 1e+18 in size, got 1e+31; it is the learning rate",
        ),
    ],
)
def test_values_that_train_nothing_or_replace_a_group_are_refused(override, says):
    assert says in refusal(override)


SCRIPT = """
import sys
from lit_rlkv.fit import main
for arguments in sys.stdin.read().splitlines():
    sys.argv = ["fit", *arguments.split()]
    try:
        main()
    except SystemExit as error:
        print(error)
assert not {"torch", "transformers", "lightning", "huggingface_hub"} & {*sys.modules}
"""
BEFORE_TORCH = {
    "num_generations=4": "did you mean 'algorithm.group_size'?",
    "--seed 3": "write seed=3",
    "optimizer.lr=0": "must be a number above 0",
    "fabric.accelerator=gpu": "needs a GPU, and this machine shows none; use fabric.accelerator=cpu",
    "cache.interval=0": "cache.interval must be a whole number of at least 1, got 0",
    "cache.budget=3": "cache: budget must be at least sink + window + 1 = 5, got 3; raise the budget",
    "evaluation.budgets=[16,4]": "evaluation.budgets: budget must be at least sink + window + 1 = 5, got 4",
    "cache.policy=snapvk": "cache: unknown cache policy 'snapvk'; choose one of dense, streaming, ",
    "cache.policy=snapkv +cache.policy_options.pool=3": "{'pool': 3} have no effect on snapkv; leave",
    "cache.policy=mypackage.policies.Mine": "add trusted_modules=[mypackage] to the command line",
    "recipe=llm model.path=someone/something": "hf download someone/something",
    "task=gsm8k": "hf download openai/gsm8k --repo-type dataset",
}


def test_mistakes_are_told_before_torch_is_imported(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(BEFORE_TORCH),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert len(said) == len(BEFORE_TORCH)
    assert [line for line, says in zip(said, BEFORE_TORCH.values(), strict=True) if says not in line] == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.n_splits=${nope}", "rollout.n_splits: Interpolation key 'nope' not found; give a value"),
        ("seed=${oc.env:NO_SUCH_VARIABLE}", "seed: .*Environment variable 'NO_SUCH_VARIABLE' not found"),
        ("evaluation.budgets=[${eval:1}]", r"evaluation.budgets\[0\]: Unsupported interpolation type eval"),
        ("runs_dir=${runs_dir}", "runs_dir: Recursive interpolation"),
        (r"runs_dir='a\${seed}'", r"runs_dir=a\$\{seed\}: a text cannot have '\$\{' in it"),
        (r"evaluation.budgets=['\${eval:1}']", r"evaluation.budgets=\[.*\]: a text cannot have '\$\{' in it"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_named_with_its_key(override, says):
    assert re.match(says, refusal(override))
