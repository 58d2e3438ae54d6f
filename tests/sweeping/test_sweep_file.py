"""Reading and checking a sweep file."""

import re
from pathlib import Path

import pytest
import yaml

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.metric import Metric
from lit_rlkv.sweeping.sweep_file import COMMAND_HINT, find_sweep, read_sweep
from tests.sweeping.files import BAYES, COMMAND, GRID, with_parameters, write


def without(key):
    return {name: value for name, value in GRID.items() if name != key}


def test_a_file_is_read_whole(tmp_path):
    content = BAYES | {"early_terminate": {"type": "hyperband", "min_iter": 3}}
    sweep = read_sweep(write(tmp_path, content))
    assert (sweep.name, sweep.method, sweep.run_cap) == ("sweep", "bayes", 24)
    assert sweep.metric == Metric(name="reward", goal="maximize")
    assert [parameter.name for parameter in sweep.parameters] == ["optimizer.lr", "experiment"]
    assert sweep.hyperband is not None


@pytest.mark.parametrize("name", ["arms", "arms.yaml", "sweeps/arms.yaml"])
def test_a_shipped_sweep_is_found_by_name_from_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert read_sweep(find_sweep(Path(name))).name == "arms"


def test_a_file_of_that_name_in_the_folder_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps").mkdir()
    write(tmp_path / "sweeps", GRID | {"name": "mine"}, "arms.yaml")
    assert read_sweep(find_sweep(Path("sweeps/arms.yaml"))).name == "mine"


@pytest.mark.parametrize("name", ["arm", "other/arms.yaml", "arms.yml"])
def test_a_path_that_is_not_there_is_refused_with_the_names_of_the_shipped_sweeps(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no sweep file at '{name}'; give a path, or one of arms, "):
        read_sweep(find_sweep(Path(name)))


def test_overrides_of_the_command_and_constants_are_in_every_run(tmp_path):
    command = [*COMMAND[:4], "task=recall", COMMAND[4]]
    parameters = GRID["parameters"] | {"experiment": {"value": "tis"}, "stages": {"value": ["sft", "rl"]}}
    sweep = read_sweep(write(tmp_path, GRID | {"command": command, "parameters": parameters}))
    assert sweep.fixed_overrides == ["task=recall", "experiment=tis", "stages=['sft', 'rl']"]


def test_a_grid_without_a_metric_is_compared_by_accuracy(tmp_path):
    assert read_sweep(write(tmp_path, without("metric"))).metric == Metric(
        name="eval/accuracy", goal="maximize"
    )
    # W&B's default, where a metric is named without a goal
    assert read_sweep(write(tmp_path, GRID | {"metric": {"name": "eval/kl"}})).metric.goal == "minimize"


def test_a_target_is_reached_from_its_better_side():
    high, low = Metric(name="reward", goal="maximize", target=0.9), Metric(name="loss", target=0.1)
    assert [high.is_reached(value) for value in (0.8, 0.9, 1.0)] == [False, True, True]
    assert [low.is_reached(value) for value in (0.2, 0.1, 0.0)] == [False, True, True]
    assert not Metric(name="reward").is_reached(1.0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GRID | {"method": "annealing"}, "method must be one of grid, random, bayes, got annealing"),
        (GRID | {"parameter": {}}, "unknown key 'parameter'; it takes program, method, parameters"),
        (without("program"), "program is missing; give it .W&B needs it"),
        (without("command"), "command is missing; .*hyphens"),
        (without("parameters"), "parameters is missing"),
        (GRID | {"parameters": {}}, "must name what to vary"),
        (GRID | {"parameters": {"seed": {"value": 1}}}, "got constants alone"),
        (GRID | {"parameters": {"seed": 1}}, "parameters.seed must say what to try, got 1"),
        (
            GRID | {"parameters": {"optimizer.lr": {"min": 1e-4, "max": 1e-2}}},
            "method grid needs a list of values",
        ),
        (GRID | {"command": ["python", "train.py"]}, "command must run fit with overrides"),
        (GRID | {"command": [*COMMAND[:4], "${args}"]}, "command must run fit with overrides"),
        (GRID | {"run_cap": 0}, "run_cap must be a whole number of at least 1 or null, got 0"),
        (GRID | {"metric": "reward"}, "metric must be a mapping or null, got reward"),
        (
            GRID | {"metric": {"name": "reward", "goal": "max"}},
            "metric.goal must be one of minimize, maximize, got max",
        ),
        (
            GRID | {"metric": {"name": "reward", "target": "1"}},
            "metric.target must be a number or null, got 1",
        ),
        (
            GRID | {"metric": {"name": "reward", "mode": "max"}},
            "unknown key 'metric.mode'; it takes name, goal, target",
        ),
        (without("metric") | {"method": "bayes"}, "method=bayes needs a metric, got none"),
        (
            without("metric") | {"early_terminate": {"type": "hyperband", "min_iter": 3}},
            "early_terminate needs a metric, got none",
        ),
        (with_parameters(run_cap=5), "parameters.run_cap is no key of a run; it belongs at the top"),
        (
            with_parameters(cache={"budget": {"values": [12, 16]}}),
            r"give cache: \{parameters: \{budget: \.\.\.\}\}, or cache\.budget: \.\.\.$",
        ),
        (
            with_parameters(cache={"parameters": {"budget": {"values": [8]}}}, cache__budget={"value": 12}),
            "parameters.cache.budget stands twice, with dots and nested",
        ),
        ([1, 2], "must hold keys with values"),
    ],
)
def test_a_mistake_in_the_file_is_one_clear_error(tmp_path, content, says):
    with pytest.raises(ConfigError, match=says):
        read_sweep(write(tmp_path, content))


def test_a_file_that_is_not_there_or_no_yaml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no sweep file"):
        read_sweep(tmp_path / "nowhere.yaml")
    (tmp_path / "broken.yaml").write_text("method: [grid")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_sweep(tmp_path / "broken.yaml")


def test_the_command_that_an_error_advises_can_be_pasted(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(COMMAND_HINT)):
        read_sweep(write(tmp_path, without("command")))
    pasted = yaml.safe_load(COMMAND_HINT)
    assert pasted == {"command": COMMAND}
    path = write(tmp_path, without("command"))
    path.write_text(f"{path.read_text()}{COMMAND_HINT}\n")
    assert read_sweep(path).command == tuple(COMMAND)


def test_broken_yaml_is_told_in_one_line(tmp_path):
    (tmp_path / "broken.yaml").write_text("method: [grid\nmetric: {name: reward\n")
    with pytest.raises(ConfigError, match=r"is not valid YAML: .*line") as caught:
        read_sweep(tmp_path / "broken.yaml")
    assert "\n" not in str(caught.value)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = write(tmp_path, GRID)
    n_lines = len(path.read_text().splitlines())
    path.write_text(f"{path.read_text()}method: random\n")
    with pytest.raises(ConfigError, match=rf"duplicate key method .*line {n_lines + 1}"):
        read_sweep(path)


def test_a_parameter_that_stands_twice_is_refused(tmp_path):
    path = write(tmp_path, GRID)
    twice = "parameters:\n  seed:\n    values: [1]\n  "
    path.write_text(path.read_text().replace("parameters:\n  ", twice))
    with pytest.raises(ConfigError, match="duplicate key seed"):
        read_sweep(path)
