import re

import pytest
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, ConfigError, build, check_keys
from tests.config.asking import asked, refusal
from tests.tiers import slow


def test_build_makes_what_the_config_names():
    assert build(asked("task.n_terms=7").task).n_terms == 7


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("cache:\n  bugdet: 8\n", "unknown key 'cache.bugdet'"),
        ("cache:\n  bugdet: 8\n", "did you mean 'cache.budget'?"),
        ("algoritm:\n  group_size: 4\n", "unknown key 'algoritm.group_size'"),
    ],
)
@pytest.mark.parametrize("group", ["experiment", slow("recipe"), slow("debug")])
def test_a_misspelt_key_in_a_preset_is_refused(tmp_path, group, body, says):
    for path in CONF_DIR.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(CONF_DIR)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / group / "mine.yaml").write_text("# @package _global_\n" + body)
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        full = compose("config", overrides=[f"{group}=mine"], return_hydra_config=True)
        with pytest.raises(ConfigError, match=re.escape(says)):
            check_keys(compose("config", overrides=[f"{group}=mine"]), full.hydra.runtime.choices)
        full = compose("config", overrides=["experiment=smd"], return_hydra_config=True)
        check_keys(compose("config", overrides=["experiment=smd"]), full.hydra.runtime.choices)


def test_added_keys_are_checked_against_the_signature():
    assert asked("+optimizer.eps=1e-6").optimizer.eps == 1e-6
    assert "unexpected 'epsilon'" in refusal("+optimizer.epsilon=1e-6")


def test_added_keys_without_a_signature_are_refused():
    says = "unknown key 'diagnostics.gradent' on the command line: did you mean 'diagnostics.gradient'?"
    assert refusal("+diagnostics.gradent=null") == says
    assert refusal("+sft.n_step=3").startswith("unknown key 'sft.n_step' on the command line")
    assert refusal("+cache.budgett=3").endswith("did you mean 'cache.budget'?")
    assert "{'alpha': 3} have no effect on random" in refusal("+cache.policy_options.alpha=3")


def test_a_diagnostic_is_left_out_by_null_and_by_nothing_else():
    assert asked("diagnostics.gradient=null").diagnostics.gradient is None
    says = "diagnostics.gradient=False takes the place of blocks, every, n_parts"
    assert refusal("diagnostics.gradient=false").startswith(says)
    assert refusal("diagnostics.gradient=false").endswith("set these one by one; null leaves it out")
