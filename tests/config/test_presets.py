"""The options and presets in conf/."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lit_rlkv.config import CONF_DIR
from lit_rlkv.runs.run import Run
from tests.config.asking import asked
from tests.tiers import short_tier

GROUPS = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())
OPTIONS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF_DIR.glob("*/*.yaml")
    if path.stem != "none" and path.stem[0] != "_"
)
FIRST_OF_EACH_GROUP = {option.partition("=")[0]: option for option in reversed(OPTIONS)}.values()
# Options that need something of the user's.
EXTRAS = {
    "task=jsonl": ["task.path=tests/data/problems.jsonl"],
    "task=dataset": ["task.dataset=tests/data/problems.jsonl"],
    "task=gsm8k": ["task.dataset=tests/data/gsm8k", "task.name=null"],
    "reward=python": ["reward.functions.custom.path=tests/data/rewards.py:score"],
    "reward=endpoint": ["reward.functions.custom.url=http://localhost:8000/score"],
    "task=preferences": ["task.path=tests/data/preferences.jsonl", "reward=learned"],
    "task=preferences_hf": ["task.dataset=tests/data/preferences.jsonl", "reward=learned"],
    "task=reasoning_gym": ["task.dataset=spell_backward"],
    "distillation=teacher": ["distillation.model=someone/something"],
    "correction=dense": ["distillation=none"],
    "recipe=llm": ["model.path=someone/something"],
    "recipe=smollm2": ["model.path=someone/something"],
    "task=custom": ["task._target_=lit_rlkv.tasks.ChainSum"],
    "model=custom": ["model.preset._target_=lit_rlkv.models.presets.tiny_qwen3"],
    "environment=custom": [
        "environment._target_=lit_rlkv.environments.Tools",
        "+environment.tools=[lit_rlkv.environments.tools.calculator]",
    ],
    "logger=custom": ["logger._target_=lightning.pytorch.loggers.CSVLogger", "+logger.save_dir=logs"],
    "algorithm=custom": [
        "algorithm.advantage._target_=lit_rlkv.experience.advantages.GroupAdvantage",
        "+algorithm.advantage.estimator=grpo",
        "algorithm.loss._target_=lit_rlkv.modules.grpo.GRPO",
        "+algorithm.loss.clip_low=0.2",
        "+algorithm.loss.clip_high=0.2",
    ],
}
PACKAGES = {"task=preferences_hf": "datasets", "task=reasoning_gym": "reasoning_gym"}
PACKAGES |= {"task=gsm8k": "datasets", "reward=math": "math_verify", "optimizer=adamw8bit": "torchao"}
"""Packages of the extras `data`, `gym`, `math` and `lowbit`."""
STABLE_NAMES = (
    "task", "model.path", "cache.policy", "cache.budget", "cache.interval", "cache.sink", "cache.window",
    "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p",
    "algorithm", "algorithm.group_size", "correction", "distillation", "distillation.weight", "stages",
    "seed", "logger", "resume",
)  # fmt: skip


@pytest.mark.parametrize("option", short_tier(OPTIONS, FIRST_OF_EACH_GROUP))
def test_every_option_of_every_group_composes_and_passes_the_checks(option):
    if option in PACKAGES:
        pytest.importorskip(PACKAGES[option])
    asked(option, *EXTRAS.get(option, []))


@pytest.mark.parametrize("experiment", sorted(path.stem for path in CONF_DIR.glob("experiment/*.yaml")))
def test_every_experiment_has_a_smoke_test_with_room_for_its_worked_solutions(experiment, tmp_path):
    cfg = asked("debug=fast", f"experiment={experiment}", f"runs_dir={tmp_path}")
    Run(cfg)
    assert cfg.algorithm.n_iterations == 2


def test_the_names_of_the_command_line_stay():
    cfg = asked()
    missing = [
        name for name in STABLE_NAMES if OmegaConf.select(cfg.source, name, default="absent") == "absent"
    ]
    assert missing == []
    assert {"experiment", "debug"} <= set(GROUPS)


def test_experiments_name_their_own_command():
    for path in (Path(CONF_DIR) / "experiment").glob("*.yaml"):
        assert f"python -m lit_rlkv.fit experiment={path.stem}" in path.read_text()
