"""Unknown keys, and the keys of the same meaning or spelling that their refusals name."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lit_rlkv.config import CONF_DIR, ConfigError, check_keys, composed
from lit_rlkv.config.composing import groups, initialized, options_of
from lit_rlkv.config.keys import (
    READ_WITH,
    TABLES,
    check_effects,
    foreign_rows,
    keys_of_options,
    same_meaning,
    suggestion,
)
from lit_rlkv.config.options import leaves
from tests.config.asking import asked, refusal
from tests.tiers import slow

OURS = {key for table in TABLES for _, ours, _ in foreign_rows(table) for key in ours}


def exists(setting, known):
    key, _, option = setting.lstrip("+").partition("=")
    return option in options_of(key) if key in groups() and option else key in known


def test_every_key_and_option_that_the_table_of_foreign_names_has_exists():
    with initialized():
        known = {key for key, _ in leaves(OmegaConf.to_container(compose("config")))}
    known |= {*keys_of_options(), *groups(), "reward.functions", "hydra.run.dir", "optimizer.eps"}
    assert len(OURS) > 90
    assert [setting for setting in OURS if not exists(setting, known)] == []
    assert not exists("cache.bugdet", known)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_generations", "algorithm.group_size"),
        ("actor_rollout_ref.rollout.n", "algorithm.group_size"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("max_steps", "algorithm.n_iterations"),
        ("temperature", "rollout.temperature"),
        ("val_kwargs.temperature", "evaluation.temperature"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", "evaluation.top_p"),
        ("loss_type", "algorithm=dr_grpo"),
        ("per_device_train_batch_size", "rollout.n_prompts"),
        ("trainer.max_epochs", "algorithm.n_iterations"),
        ("buget", "cache.budget"),
        ("distillation.path", "distillation.model"),
        ("distillation.teacher.path", "distillation.model"),
        ("+cahce.budget", "cache.budget"),
        ("rolout", "rollout"),
        ("diagnostics.gradent", "diagnostics.gradient"),
        ("logger.projct", "logger.project"),
        ("logger.project", "logger=wandb"),
        ("cache.policy_option.seed", "did you mean 'cache.policy_options.seed'"),
        ("cache.seed", "did you mean 'cache.policy_options.seed', if the policy takes it?"),
        ("cache.budgets", "did you mean 'cache.budget'?"),
        ("zzz", "docs/reference/config.md"),
    ],
)
def test_an_unknown_key_leads_to_the_one_that_is_meant(key, meant):
    said = refusal(f"{key}=3")
    assert said.startswith(f"unknown key {key.lstrip('+')!r}")
    assert meant in said


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("loss_type=grpo", "here it is algorithm=grpo, algorithm.aggregation=sequence"),
        ("loss_type=cispo", "here it is algorithm=cispo"),
        (
            "loss_type=unknown",
            "algorithm.aggregation=token, algorithm=dr_grpo, algorithm.aggregation=constant",
        ),
        ("optim=adamw_8bit", "here it is optimizer=adamw8bit"),
    ],
)
def test_a_name_is_answered_by_its_value_where_that_is_known(override, meant):
    said = refusal(override)
    assert meant in said
    assert ("dr_grpo" in said) is (override == "loss_type=unknown")


def test_keys_of_one_group_are_not_alike_because_they_begin_alike():
    assert "did you mean" not in suggestion("diagnostics.wall", ["diagnostics.cache"])
    assert "'diagnostics.cache'" in suggestion("diagnostics.cahce", ["diagnostics.cache"])
    assert "did you mean" not in suggestion("task.foo", ["algorithm.curriculum.floor"])
    assert "'algorithm.curriculum.floor'" in suggestion(
        "algorithm.curriculum.foo", ["algorithm.curriculum.floor"]
    )
    assert same_meaning("cache.wall") == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+optimizer.epsilon=1e-6", "'epsilon'"),  # a signature judges it
        ("cache.policy_options.alpha=3", "'alpha'; it takes seed"),
        ("cache.policy_options.value_nrms=3 cache.policy=h2o", "'value_nrms'; it takes value_norms"),
        ("+cache.policy_options.alpha=3", "'alpha'; it takes seed"),
        ("optimizer.eps=1e-6", "if the class that _target_ names takes it, add it by +optimizer.eps=..."),
        ("reward.functions.custom.path=f.py:g", "reward=python has it"),
        ("reward.functions.mine.wieght=1", "unknown key 'reward.functions.mine.wieght'"),
        ("cache=snapkv", "cache.policy"),
        ("algorithm.kl=0.1", "algorithm.kl.weight"),
        ("diagnostics.gradient=false", "diagnostics.gradient.every"),
        ("~distillation", "distillation=..."),
        ("~reward", "reward=..."),
        ("~sft.n_steps", "sft.n_steps=..."),
        ("recipe=llm", "recipe=llm needs model.path"),
        ("cache.policy_options=[1]", "has keys of its own, got [1]; give cache.policy_options.NAME=..."),
        ("cache=null", "cache=null takes the place of cache.budget"),
    ],
)
def test_keys_that_are_added_replaced_or_removed_are_checked(override, key):
    assert key in refusal(*override.split())


def test_a_key_that_nothing_would_read_is_refused_with_the_one_that_it_needs():
    cfg = composed("config", [])
    with initialized():
        known = {key for key, _ in leaves(OmegaConf.to_container(compose("config")))}
    for other, keys in READ_WITH.items():
        above, *names = keys.split()
        assert known >= {other, *(f"{above}.{name}" for name in names)}
        for key in (f"{above}.{name}" for name in names):
            OmegaConf.update(cfg, key, 3)
            with pytest.raises(ConfigError, match=rf"{key}=3 has no effect with {other}=(null|random|0);"):
                check_effects(cfg, [f"{key}=3"])
            check_effects(cfg, ["seed=3"])  # a preset may set it
            OmegaConf.update(cfg, key, None)
            check_effects(cfg, [f"{key}=null"])
    assert "algorithm.eviction.weight=0.7 has no effect with cache.policy=random" in refusal(
        "cache.policy=random", "algorithm.eviction.weight=0.7"
    )
    asked("experiment=tools", "rollout.max_turns=3", "cache.policy=learned", "algorithm.eviction.weight=0.7")


@pytest.mark.parametrize("plus", ["", "+"])
def test_keys_of_free_mappings_need_no_plus(plus):
    h2o = asked("cache.policy=h2o", f"{plus}cache.policy_options.value_norms=true")
    assert h2o.cache.policy_options == {"value_norms": True}
    whole = asked("cache.policy=h2o", f"{plus}cache.policy_options={{value_norms:true}}")
    assert whole.parts.cache == h2o.parts.cache
    short = asked(f"{plus}reward.functions.short={{_target_:lit_rlkv.rewards.Regex,pattern:x,weight:0.5}}")
    assert short.parts.reward_functions["short"].weight == 0.5


def test_optional_keys_may_be_added_and_removed():
    assert asked("+optimizer.eps=1e-6").optimizer.eps == 1e-6
    assert asked("diagnostics.gradient=null").diagnostics.gradient is None
    asked("~debug")
    asked("~diagnostics.gradient")
    asked("~correction.weight_fn.cap", "experiment=tis")


@pytest.mark.parametrize(
    ("body", "key"),
    [("cache:\n  bugdet: 8\n", "cache.budget"), ("algoritm:\n  group_size: 4\n", "group_size")],
)
@pytest.mark.parametrize("group", ["experiment", slow("recipe"), slow("debug")])
def test_a_misspelt_key_in_a_preset_is_refused(tmp_path, group, body, key):
    for path in CONF_DIR.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(CONF_DIR)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / group / "mine.yaml").write_text("# @package _global_\n" + body)
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        full = compose("config", overrides=[f"{group}=mine"], return_hydra_config=True)
        with pytest.raises(ConfigError, match=f"unknown key .*{key}"):
            check_keys(compose("config", overrides=[f"{group}=mine"]), full.hydra.runtime.choices)
        full = compose("config", overrides=["experiment=smd"], return_hydra_config=True)
        check_keys(compose("config", overrides=["experiment=smd"]), full.hydra.runtime.choices)
