"""Whole runs at a size that takes a second, for tests that need a run's folder."""

from hydra import compose, initialize_config_dir
from rich.console import Console

from lit_rlkv.config import CONF_DIR, check_config
from lit_rlkv.fit import fit

TINY = [
    "debug=fast",
    "model.preset.hidden_size=32",
    "model.preset.num_hidden_layers=2",
    "model.preset.head_dim=8",
    "model.preset.intermediate_size=32",
    "task.n_terms=3",
    "cache.budget=7",
    "cache.interval=2",
    "cache.window=2",
    "evaluation.budgets=[5]",
    "rollout.max_new_tokens=8",
]


def config(tmp_path, *overrides):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=[*TINY, f"runs_dir={tmp_path}", *overrides])
    check_config(cfg)
    return cfg


def run(tmp_path, name, *overrides):
    cfg = config(tmp_path, *overrides)
    return fit(cfg, tmp_path / name, Console(quiet=True))
