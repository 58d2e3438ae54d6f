"""Names of other packages and misspelt keys: what the errors say to write instead."""

import re

import pytest

from lit_rlkv.config import ConfigError, check_command_line
from lit_rlkv.config.composing import (
    groups,
    hint_at,
    initialized,
    keys_of_options,
    known_keys,
    options_of,
)
from lit_rlkv.config.hints import foreign_rows, hint
from tests.config.asking import refusal

TRL, VERL, OTHERS = (foreign_rows()[name] for name in ("trl", "verl", "others"))
SHOWN = re.compile(r"`([^` ]+)`")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_generations", "algorithm.group_size"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("beta", "algorithm.kl.weight"),
        ("epsilon", "algorithm.loss.clip_low"),
        ("per_device_train_batch_size", "rollout.n_prompts"),
        ("learning_rate", "optimizer.lr"),
        ("max_steps", "algorithm.n_iterations"),
        ("trainer.max_epochs", "algorithm.n_iterations"),
        ("vllm_importance_sampling_mode", "correction=sequence_mis"),
        ("model_name_or_path", "model.path"),
        ("lora_r", "roles.rank"),
        ("actor_rollout_ref.rollout.n", "algorithm.group_size"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.lr"),
        ("actor_rollout_ref.actor.ppo_epochs", "algorithm.n_epochs"),
        ("ppo_mini_batch_size", "algorithm.n_minibatches"),
        ("algorithm.gamma", "algorithm.advantage.gamma"),
        ("trainer.total_training_steps", "algorithm.n_iterations"),
        ("trainer.devices", "fabric.devices"),
        ("press", "cache.policy"),
        ("temperature", "'evaluation.temperature' or 'rollout.temperature'"),
        ("lr", "'optimizer.lr' or 'sft.optimizer.lr'"),
        ("sft.lr", "sft.optimizer.lr"),
        ("buget", "cache.budget"),
        ("cahce.budget", "cache.budget"),
        ("cache.size", "cache has the keys budget, "),
        ("trainer.seed", "seed"),
        ("logger.project", "logger=wandb has it"),
        ("zzz", "--help-all"),
    ],
)
def test_an_unknown_key_leads_to_the_one_that_is_meant(key, meant):
    with initialized():
        said = hint_at(key, "config")
    assert meant in said
    assert "\n" not in said


def test_a_parent_of_a_key_is_never_suggested():
    assert "rollout'" not in hint("rollout.x", ["rollout", "rollout.temperature", "task"])


def test_every_key_and_option_that_a_row_names_exists():
    with initialized():
        known = {*known_keys("config"), *keys_of_options(), *groups(), "hydra.run.dir", "optimizer.eps"}
    for rows, n_least in ((TRL, 40), (VERL, 40), (OTHERS, 50)):
        assert len(rows) >= n_least
        for _, ours, note in rows:
            for shown in SHOWN.findall(ours or note):
                key, _, value = shown.lstrip("+").partition("=")
                assert key in known or key.startswith(".") or not value, shown
                if key in groups() and value.islower():
                    assert value in options_of(key), shown


@pytest.mark.parametrize(
    ("program", "argument", "says"),
    [
        ("config", "--seed=3", "write seed=3"),
        ("config", "--max_steps", "'algorithm.n_iterations'"),
        ("config", "--gradient_checkpointing", "roles.gradient_checkpointing"),
        ("config", "wandb", "write logger=wandb"),
        ("config", "tis", "write correction=tis or experiment=tis"),
        ("config", "Qwen/Qwen2.5-0.5B", "model.path=Qwen/Qwen2.5-0.5B"),
        ("config", "model=Qwen/Qwen2.5-0.5B", "is model.path=Qwen/Qwen2.5-0.5B"),
        ("config", "task=data/mine.jsonl", "task=dataset task.dataset=data/mine.jsonl"),
        ("config", "algorithm=grop", "did you mean algorithm=grpo?"),
        ("config", "optimizer=sgd", "optimizer._target_=torch.optim.NAME"),
        ("config", "num_generations=4", "unknown key 'num_generations': write 'algorithm.group_size'"),
        ("evaluate", "runs/x", "write ckpt=runs/x"),
        ("evaluate", "budget=3", "did you mean 'budgets'?"),
    ],
)
def test_a_command_line_in_another_form_is_answered(program, argument, says):
    with pytest.raises(ConfigError) as caught:
        check_command_line(program, [argument])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cache=snapkv", "cache must have the keys policy"),
        ("optimizer.lr=0", "optimizer.lr"),
        ("sft.optimizer.lr=0.0", "sft.optimizer.lr"),
        ("optimizer.lr=1e31", "optimizer.lr"),
        ("~cache.budget", "~cache.budget"),
        ("~task", "~task"),
        ("recipe=llm", "model.path"),
    ],
)
def test_what_trains_nothing_or_is_taken_away_is_refused(override, says):
    assert says in refusal(override)
