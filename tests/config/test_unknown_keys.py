"""Keys that do not exist are refused, wherever they are written."""

import pytest
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, ConfigError, build, parse_config
from tests.config.asking import asked, refusal


def test_build_makes_what_the_config_names():
    assert build(asked("task.n_terms=7").task).n_terms == 7


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("cache:\n  bugdet: 8\n", r"unknown key 'cache.bugdet': did you mean 'cache.budget'\?"),
        ("algoritm:\n  group_size: 4\n", "unknown key 'algoritm': did you mean 'algorithm'"),
    ],
)
def test_a_misspelt_key_in_a_preset_is_refused(tmp_path, body, says):
    for path in CONF_DIR.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(CONF_DIR)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\n" + body)
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        parse_config(compose("config", overrides=["experiment=smd"]))
        with pytest.raises(ConfigError, match=says):
            parse_config(compose("config", overrides=["experiment=mine"]))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+optimizer.epsilon=1e-6", "unexpected 'epsilon'"),
        ("+diagnostics.gradent.every=3", "diagnostics.gradent"),
        ("+sft.n_step=3", "unknown key 'sft.n_step'"),
        ("+cache.budgett=3", "did you mean 'cache.budget'?"),
        ("+cache.policy_options.alpha=3", "{'alpha': 3} have no effect on random"),
        ("diagnostics.gradient=false", "diagnostics.gradient"),
    ],
)
def test_an_added_key_that_nothing_takes_is_refused(override, says):
    assert says in refusal(override)


def test_an_added_argument_and_a_diagnostic_that_is_left_out_are_taken():
    assert asked("+optimizer.eps=1e-6").optimizer.eps == 1e-6
    assert asked("diagnostics.gradient=null").diagnostics.gradient is None
