"""What a sweep file must say before anything is done with it."""

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.metric import Metric
from lit_rlkv.sweeping.spec import read_sweep
from tests.sweeping.files import BAYES, COMMAND, GRID, write


def without(key):
    return {name: value for name, value in GRID.items() if name != key}


def test_a_file_is_read_whole(tmp_path):
    content = BAYES | {"early_terminate": {"type": "hyperband", "min_iter": 3}}
    sweep = read_sweep(write(tmp_path, content))
    assert (sweep.name, sweep.method, sweep.run_cap) == ("sweep", "bayes", 24)
    assert sweep.metric == Metric("reward", "maximize")
    assert [parameter.name for parameter in sweep.parameters] == ["optimizer.lr", "experiment"]
    assert sweep.hyperband is not None


def test_overrides_of_the_command_and_constants_are_in_every_run(tmp_path):
    command = [*COMMAND[:4], "task=recall", COMMAND[4]]
    parameters = GRID["parameters"] | {"experiment": {"value": "tis"}, "stages": {"value": ["sft", "rl"]}}
    sweep = read_sweep(write(tmp_path, GRID | {"command": command, "parameters": parameters}))
    assert sweep.fixed_overrides == ["task=recall", "experiment=tis", "stages=['sft', 'rl']"]


def test_a_grid_without_a_metric_is_compared_by_accuracy(tmp_path):
    assert read_sweep(write(tmp_path, without("metric"))).metric == Metric("eval/accuracy", "maximize")
    # W&B's default, where a metric is named without a goal
    assert read_sweep(write(tmp_path, GRID | {"metric": {"name": "eval/kl"}})).metric.goal == "minimize"


def test_a_target_is_reached_from_its_better_side():
    high, low = Metric("reward", "maximize", target=0.9), Metric("loss", "minimize", target=0.1)
    assert [high.is_reached(value) for value in (0.8, 0.9, 1.0)] == [False, True, True]
    assert [low.is_reached(value) for value in (0.2, 0.1, 0.0)] == [False, True, True]
    assert not Metric("reward").is_reached(1.0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GRID | {"method": "annealing"}, "method='annealing' is unknown; choose one of grid, random, bayes"),
        (GRID | {"parameter": {}}, "unknown key 'parameter'; did you mean 'parameters'"),
        (without("program"), "program is missing; W&B asks for it"),
        (without("command"), "command is missing; W&B's own has hyphens"),
        (without("parameters"), "parameters is missing"),
        (GRID | {"parameters": {}}, "names nothing to vary"),
        (GRID | {"parameters": {"seed": {"value": 1}}}, "hold constants alone"),
        (GRID | {"parameters": {"seed": 1}}, "parameters.seed=1 says not what to try"),
        (
            GRID | {"parameters": {"optimizer.lr": {"min": 1e-4, "max": 1e-2}}},
            "method grid needs a list of values",
        ),
        (GRID | {"command": ["python", "train.py"]}, "does not run fit with overrides"),
        (GRID | {"command": [*COMMAND[:4], "${args}"]}, "does not run fit with overrides"),
        (GRID | {"run_cap": 0}, "run_cap=0 is no number of runs"),
        (GRID | {"metric": "reward"}, "metric='reward' has no name"),
        (GRID | {"metric": {"name": "reward", "goal": "max"}}, "metric.goal='max' is unknown"),
        (GRID | {"metric": {"name": "reward", "target": "1"}}, "metric.target='1' is no number"),
        (GRID | {"metric": {"name": "reward", "mode": "max"}}, "metric: unexpected 'mode'"),
        (without("metric") | {"method": "bayes"}, "method=bayes improves a metric, and none is named"),
        (
            without("metric") | {"early_terminate": {"type": "hyperband", "min_iter": 3}},
            "early_terminate compares runs by a metric, and none is named",
        ),
        ([1, 2], "holds no keys with values"),
    ],
)
def test_a_mistake_in_the_file_is_one_clear_error(tmp_path, content, says):
    with pytest.raises(ConfigError, match=says):
        read_sweep(write(tmp_path, content))


def test_a_file_that_is_not_there_or_no_yaml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no sweep file"):
        read_sweep(tmp_path / "nowhere.yaml")
    (tmp_path / "broken.yaml").write_text("method: [grid")
    with pytest.raises(ConfigError, match="is no YAML"):
        read_sweep(tmp_path / "broken.yaml")
