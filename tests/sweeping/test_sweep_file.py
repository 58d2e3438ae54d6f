from pathlib import Path

import pytest
import yaml

from lit_rlkv.config import SWEEPS_DIR, ConfigError
from lit_rlkv.sweeping.sweep_file import COMMAND, find_sweep, read_sweep
from tests.sweeping.files import BAYES, GRID, LOG_LR, sweep_of, with_parameters, write

SHIPPED = sorted(SWEEPS_DIR.glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_name_their_claim_and_log_to_wandb_there_alone(path):
    assert path.read_text().startswith("# Claim: ")
    assert yaml.safe_load(path.read_text())["parameters"]["logger"] == {"value": "wandb"}
    sweep = read_sweep(path)
    assert "logger=csv" in sweep.fixed
    assert "logger=wandb" not in sweep.fixed
    assert sweep.n_runs() >= 10


def test_a_name_finds_the_shipped_file():
    for name in ("arms", "arms.yaml"):
        assert find_sweep(Path(name)) == SWEEPS_DIR / "arms.yaml"


def test_a_grid_is_the_product_with_the_first_key_slowest(tmp_path):
    sweep = sweep_of(tmp_path)
    assert [tuple(cell.values()) for cell in sweep.cells] == [("0", "5"), ("0", "7"), ("1", "5"), ("1", "7")]
    assert sweep.n_runs() == 4
    assert sweep.n_runs(3) == 3
    assert sweep.n_runs(9) == 4


def test_the_command_line_of_a_run_has_its_values_constants_overrides_and_folder(tmp_path):
    content = with_parameters(
        seed={"values": [0, None]}, sft__seed={"value": 3}, logger__log_every={"value": 2}
    )
    sweep = sweep_of(tmp_path, content, "sft.seed=4")
    assert sweep.arguments(sweep.cells[1], tmp_path / "0001") == [
        "seed=null",
        "logger=csv",
        "fabric.n_threads=1",
        "sft.seed=3",
        "sft.seed=4",
        f"hydra.run.dir='{tmp_path / '0001'}'",
        "resume=auto",
    ]


def test_a_debug_preset_of_the_user_wins_over_the_file():
    path = SWEEPS_DIR / "arms.yaml"
    assert "algorithm.n_iterations=150" in read_sweep(path).fixed
    fixed = read_sweep(path, ("debug=fast",)).fixed
    assert not [one for one in fixed if one.startswith(("algorithm.n_iterations", "sft.batch_size"))]
    assert "evaluation.budgets=[]" in fixed


def test_numbers_are_drawn_from_the_distributions_that_optuna_has(tmp_path):
    kinds = {
        "a": {"min": 1, "max": 5},
        "b": {"min": 0.5, "max": 5},
        "c": {"min": 1.0, "max": 3.0, "q": 0.5, "distribution": "q_uniform"},
        "d": LOG_LR,
    }
    space = sweep_of(tmp_path, BAYES | {"parameters": kinds}).space
    assert [type(each).__name__ for each in space.values()] == ["IntDistribution"] + 3 * ["FloatDistribution"]
    assert (space["c"].step, space["d"].log) == (0.5, True)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"early_terminate": {"type": "hyperband", "min_iter": 3}}, "early_terminate"),
        ({"method": "hill"}, "method"),
        ({"command": [*COMMAND, "task=sorting"]}, "command"),
        ({"metric": {"nam": "reward"}}, "metric.nam"),
        ({"parameters": {"seed": {"value": 1}}}, "parameters"),
        ({"parameters": {"seed": 3}}, "parameters.seed"),
        ({"parameters": {"seed": {"values": []}}}, "parameters.seed"),
        ({"parameters": {"seed": {"values": [1], "probabilities": [1]}}}, "parameters.seed"),
        ({"parameters": {"optimizer.lr": LOG_LR}}, "optimizer.lr"),
        ({"parameters": GRID["parameters"] | {"trusted_modules": {"value": ["os"]}}}, "trusted_modules"),
        ({"parameters": GRID["parameters"] | {"hydra.run.dir": {"value": "x"}}}, "hydra.run.dir"),
        (BAYES | {"run_cap": None}, "run_cap"),
        (BAYES | {"parameters": {"optimizer.lr": {"min": 2.0, "max": 1.0}}}, "optimizer.lr"),
        (
            BAYES | {"parameters": {"optimizer.lr": {"mu": 0, "sigma": 1, "distribution": "normal"}}},
            "optimizer.lr",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path, change, names):
    with pytest.raises(ConfigError, match=names):
        sweep_of(tmp_path, GRID | change).n_runs()


@pytest.mark.parametrize("override", ["seed=3", "resume=auto", "hydra.run.dir=x"])
def test_an_override_cannot_take_what_the_sweep_sets(tmp_path, override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        sweep_of(tmp_path, GRID, override)


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "x: &a [1]\nparameters: {seed: *a}", "parameters: 3", "\x00"]
)
def test_what_is_no_sweep_file_is_one_line(tmp_path, text):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"sweep\.yaml"):
        read_sweep(path)
    with pytest.raises(ConfigError, match="arms"):
        read_sweep(write(tmp_path, GRID).with_name("none.yaml"))
