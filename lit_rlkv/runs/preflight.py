"""Try the reward functions before any work."""

from lit_rlkv.config import ConfigError, as_config_errors
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.validation import check_answers
from lit_rlkv.runs.context import RunContext


def check_reward_functions(context: RunContext) -> None:
    """Score the worked solution of one problem with each reward function, to find its errors early.

    Raises:
        ConfigError: rows that it could not score any completion of, or it does not answer with a number.
    """
    cfg, rewards = context.cfg, context.rewards
    with as_config_errors("task"):
        check_answers(context.task, rewards.functions, cfg.seed)
        problems = PromptSource(context.task, split="train", seed=cfg.seed).take(1)
    names = [name for name in rewards.functions if "rl" in cfg.stages or name == cfg.reward.accuracy]
    with as_config_errors("reward.functions"):
        answers = rewards.ask(problems, [problem.solution for problem in problems], names).collect(
            warns=False
        )
    for name, error in answers.errors.items():
        rewards.close()
        raise ConfigError(
            f"reward.functions.{name} has no score for a worked solution of {context.task}: {error}"
        )
