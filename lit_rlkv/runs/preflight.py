"""Reward functions tried before any work."""

from lit_rlkv.config import ConfigError, as_config_errors
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.validation import check_answers
from lit_rlkv.runs.context import RunContext


def check_reward_functions(parts: RunContext) -> None:
    """Ask each function about the worked solution of one problem: what is wrong with it is said early.

    Raises:
        ConfigError: rows that it could not score any completion of, or it does not answer with a number.
    """
    cfg, rewards = parts.cfg, parts.rewards
    with as_config_errors("task"):
        check_answers(parts.task, rewards.functions, cfg.seed)
        problems = PromptSource(parts.task, split="train", seed=cfg.seed).take(1)
    names = [name for name in rewards.functions if "rl" in cfg.stages or name == cfg.reward.accuracy]
    with as_config_errors("reward.functions"):
        answers = rewards.ask(problems, [problem.solution for problem in problems], names).collect(
            warns=False
        )
    for name, error in answers.errors.items():
        rewards.close()
        raise ConfigError(
            f"reward.functions.{name} has no score for a worked solution of {parts.task}: {error}"
        )
