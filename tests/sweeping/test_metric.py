"""The check that runs of a config log a metric."""

import csv
import json

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.metric import Metric, check_metric, logged_names
from tests.tiers import every_nth
from tests.whole_runs import config, run

REFUSED = [
    ("lm_loss", [], "metric='lm_loss' is logged by no run in rl or eval"),
    ("value_loss", ["algorithm=grpo"], "choose algorithm=ppo"),
    ("value/mean", ["algorithm=online_dpo"], "choose algorithm=ppo"),
    ("dpo_loss", ["algorithm=grpo"], "choose algorithm=online_dpo"),
    ("rewards/margins", ["algorithm=ppo"], "choose algorithm=online_dpo"),
    ("policy_loss", ["algorithm=online_dpo"], "choose an algorithm other than online_dpo"),
    ("eval/learned_reward", ["reward=verifier"], "raise reward.learned"),
    ("rewards/correct/mean", ["reward=verifier"], "add reward.functions"),
    ("objective/kl", ["algorithm=grpo", "distillation=none"], "raise algorithm.kl.weight"),
    ("kl", ["algorithm=ppo"], "algorithm.kl.place=loss"),
    ("smd/kl", ["distillation=anchor"], "distillation.weight above 0"),
    ("smd/anchor/kl", ["distillation=none"], "distillation.anchor_weight above 0"),
    ("kv/replay_gap", ["correction=tis", "distillation=none"], "choose correction=shadow"),
    ("kv/replay_gap_p99", ["experiment=shadow"], "correction.bypass_mode=false"),
    ("perf/mfu/update", ["diagnostics.performance=null"], "switch diagnostics.performance on"),
    ("time/diagnostics/cache", ["diagnostics=none"], "switch diagnostics.cache on"),
]
NAMES = [name for name, *_ in REFUSED]


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(("name", "overrides", "says"), every_nth(3, REFUSED), ids=NAMES)
def test_a_metric_that_no_run_of_the_config_logs_is_refused(tmp_path, name, overrides, says):
    with pytest.raises(ConfigError, match=says):
        check_metric(Metric(name=name), config(tmp_path, *overrides), is_watched=False)


def is_accepted(name, cfg):
    try:
        check_metric(Metric(name=name), cfg, is_watched=False)
    except ConfigError:
        return False
    return True


RUNS = {
    "grpo": ["experiment=tis", "diagnostics=none"],
    "online_dpo": ["experiment=online_dpo_smd", "diagnostics=none"],
    "ppo": ["experiment=rlhf", "reward=mixed", "diagnostics=none"],
    "measured": ["experiment=smd"],
    "residual": ["experiment=shadow", "correction.bypass_mode=false", "diagnostics=none"],
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_exactly_the_logged_metrics_are_accepted(tmp_path, overrides):
    overrides = ["roles.rank=2", "stages=[sft,rl,eval]", *overrides]
    run(tmp_path, "run", *overrides)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        logged = set(next(csv.reader(file)))
    logged |= json.loads((tmp_path / "run" / "evaluation.json").read_text())["final"].keys()
    cfg = config(tmp_path, *overrides)
    assert {name for name in logged if not is_accepted(name, cfg)} == set()
    if "diagnostics=none" in overrides:
        plain = {name for name in logged_names() if "{" not in name}
        assert {name for name in plain - logged if is_accepted(name, cfg)} == set()
