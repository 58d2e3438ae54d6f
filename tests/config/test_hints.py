import pytest
from omegaconf import OmegaConf

from lit_rlkv.config.composing import TRL_VERL_ALIASES, closest
from tests.config.asking import asked, refusal


def test_every_name_of_another_package_leads_to_a_key_that_exists():
    cfg = asked()
    assert [key for key in TRL_VERL_ALIASES.values() if OmegaConf.select(cfg.source, key) is None] == []


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("num_generations=4", "algorithm.group_size"),
        ("rollout.n=4", "algorithm.group_size"),
        ("actor_rollout_ref.rollout.n=4", "algorithm.group_size"),
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("lr=1", "optimizer.lr"),
        ("sft.lr=1", "sft.optimizer.lr"),
        ("beta=0.1", "algorithm.kl.weight"),
        ("max_new_tokens=9", "rollout.max_new_tokens"),
        ("algorithm.max_steps=3", "algorithm.n_iterations"),
        ("+optimizer_lr.lr=1", "optimizer.lr"),
    ],
)
def test_a_name_of_another_package_or_of_no_group_is_understood(override, meant):
    assert f"did you mean {meant!r}?" in refusal(override)


def test_a_parent_of_a_key_is_never_suggested():
    known = ["rollout", "rollout.temperature", "task"]
    assert closest("rollout.x", known) is None
    assert closest("rolout", known) == "rollout"  # twin: a group that is spelt alike
