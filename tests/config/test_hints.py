import pytest

from lit_rlkv.config.hints import hint, spelt_alike
from tests.config.asking import refusal


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("num_generations=4", "algorithm.group_size"),
        ("actor_rollout_ref.rollout.n=4", "algorithm.group_size"),
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("sft.lr=1", "sft.optimizer.lr"),
        ("+optimizer_lr.lr=1", "optimizer.lr"),
        ("+max_new_tokens=9", "rollout.max_new_tokens"),
    ],
)
def test_a_name_of_another_package_or_of_no_group_is_understood(override, meant):
    assert f"did you mean {meant!r}?" in refusal(override)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("buget", "did you mean 'cache.budget'?"),
        ("cahce.budget", "did you mean 'cache.budget'?"),
        ("cache.temprature", "did you mean 'evaluation.temperature' or 'rollout.temperature'?"),
        ("cache.size", "cache has the keys budget, policy"),
        ("trainer.seed", "did you mean 'seed'?"),
        ("project", "did you mean 'logger.project' of logger=wandb?"),
        ("logger.project", "logger=wandb has it"),
        ("zzz", None),
    ],
)
def test_a_key_is_found_by_its_spelling_or_its_last_name(key, says):
    known = ["seed", "cache", "cache.budget", "cache.policy", "rollout.temperature", "evaluation.temperature"]
    assert hint(key, known, {"logger.project": "logger=wandb"}) == says


def test_a_parent_of_a_key_is_never_suggested():
    known = ["rollout", "rollout.temperature", "task"]
    assert spelt_alike("rollout.x", known) == []
    assert spelt_alike("rolout", known) == ["rollout"]  # twin: a group that is spelt alike


def test_keys_of_one_group_are_not_alike_because_they_begin_alike():
    assert spelt_alike("diagnostics.wall", ["diagnostics.cache"]) == []
    assert spelt_alike("diagnostics.cahce", ["diagnostics.cache"]) == ["diagnostics.cache"]
