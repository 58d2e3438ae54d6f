"""The evaluation stage: accuracy on held-out prompts by cache, and the quality of the reward model."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random

from transformers import PreTrainedModel

from lit_rlkv.config import ConfigError, as_config_errors
from lit_rlkv.config.schema import EvaluationConfig
from lit_rlkv.data.demonstrations import preference_pair
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.evaluation.evaluator import CacheScore, Evaluator, caches_to_evaluate
from lit_rlkv.evaluation.results import EvalRow, RewardReport
from lit_rlkv.evaluation.reward_model import score_pairs
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.adapters import lora_layers, use_adapter
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.hydra import Roles, acting_as, make_head
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.reporting.progress import say, track
from lit_rlkv.reporting.run_metrics import final_metrics
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.memory import evaluation_rows, passes_of, tokens_per_pass
from lit_rlkv.runs.policy import load_backbone, shard
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import critic_dir, load_reward_head
from lit_rlkv.types import PreferencePair, Problem, Rollout

log = logging.getLogger(__name__)


def evaluate_before_training(run: Run, module: PolicyModule, start: str | Path) -> None:
    """Score the reward model and the policy that training starts from, unless an earlier process did.

    The policy is scored again if the settings of the evaluation have changed.
    """
    results = run.results
    if results.reward_model is None:
        with run.timed("eval"):
            results.reward_model = report_on_reward(run, module.roles, start)
    if "rl" not in run.cfg.stages and run.resume_from is None:
        return  # evaluate_after_training scores the same policy
    settings = asdict(run.cfg.evaluation) | {"budgets": list(run.cfg.evaluation.budgets)}
    settings["accuracy"] = run.cfg.accuracy
    settings.pop("batch_size")  # fits the memory of a machine, so it may differ on resume
    # A setting that the results do not name is newer than they are, and had its default.
    defaults = {name: value for name, value in asdict(EvaluationConfig()).items() if name in settings}
    if results.before and (results.settings == {} or defaults | results.settings == settings):
        return
    say(run.console, "before training", stage="eval")
    with run.timed("eval"):
        results.before, results.rollout = evaluate_policy(run, module.roles)
        results.settings = settings


def evaluate_after_training(run: Run, module: PolicyModule) -> None:
    """Score the policy as it is now and save all results of the run."""
    results = run.results
    say(run.console, "after training" if "rl" in run.cfg.stages else "", stage="eval")
    with run.timed("eval"):
        results.after, results.rollout = evaluate_policy(run, module.roles)
    results.final = final_metrics(results.before, results.after, run.parts.cache.label)
    run.save_results(must_succeed=True)


def score_caches(
    run: Run, roles: Roles, caches: Sequence[CacheSpec], n_samples: int = 1
) -> Iterator[CacheScore]:
    """Evaluate the policy with each cache on the same held-out prompts; yield one score at a time.

    Signals are handled before each cache.
    """
    evaluator = Evaluator(
        run,
        roles,
        held_out_problems(run),
        n_samples,
        batch_size=evaluation_rows(run, roles, caches),
        tokens_per_pass=tokens_per_pass(run, passes_of(run, roles), checkpoints=True),
        texts=() if run.texts is None else run.texts.rows,
    )
    rows: list[EvalRow] = []
    with track("eval", len(caches)) as advance, run.fabric.autocast():
        for cache in caches:
            run.interruption.raise_if_requested(run.fabric)
            # The log-probs of the mismatch come after the last token.
            on_progress = partial(advance.within, n_total=evaluator.n_tokens + 1)
            found = evaluator.score_cache(cache, on_progress)
            rows.append(found.row)
            known = {"accuracy": found.row.accuracy, "reward": found.row.reward}
            advance(1, cache=cache.label, **{key: "–" if x is None else x for key, x in known.items()})
            yield found
    best = max(row.reward or 0.0 for row in rows)
    if best > 0 and all(row.accuracy == 0 for row in rows) and run.is_rank_zero:
        log.warning(
            "accuracy is 0 with every cache although the mean reward is up to %.3g: no response has the full "
            "score 1 of %s; reward.accuracy=NAME counts by a function of reward.functions instead",
            best,
            run.cfg.accuracy,
        )


def evaluate_policy(run: Run, roles: Roles) -> tuple[list[EvalRow], Rollout | None]:
    """Return the scores of every cache, and rank 0's rollout under the run's own budget.

    Raises:
        InterruptedRunError: a signal ended the run; the scores so far are lost.
    """
    own = run.parts.cache
    caches = caches_to_evaluate(own, run.cfg.evaluation.budgets)
    rows, pictured = [], None
    scores = score_caches(run, roles, caches)
    for cache, found in zip(caches, scores, strict=True):
        rows.append(found.row)
        if cache == own or pictured is None:
            pictured = found.rollout
    return rows, pictured


def held_out_problems(run: Run) -> list[Problem]:
    """Return at most `evaluation.n_prompts` problems of the eval split."""
    source, n_prompts = PromptSource(run.task, split="eval", seed=run.cfg.seed), run.cfg.evaluation.n_prompts
    return source.take(min(n_prompts, source.size or n_prompts))


def held_out_pairs(run: Run) -> list[PreferencePair]:
    """Return the preference pairs of the held-out problems."""
    rng = Random(derive_seed(run.cfg.seed, "corrupt", "eval"))
    with as_config_errors("task"):
        return [preference_pair(run.task, problem, rng) for problem in held_out_problems(run)]


def report_on_reward(run: Run, roles: Roles, start: str | Path) -> RewardReport | None:
    """Return the quality of the starting model's reward head, whether or not this run rewards by it.

    None without a reward head, or, with a warning, if the task makes no pairs. Call it before training.
    """
    folder = critic_dir(start)
    weights = load_reward_head(folder)
    if weights is None:
        return None
    try:
        pairs = held_out_pairs(run)
    except (ConfigError, NotImplementedError) as error:  # a task of the user's may leave `corrupt` out
        log.warning("the reward head of %s is not scored: the task makes no pairs (%r)", folder, error)
        return None
    if "reward" in roles.needed:
        with acting_as(roles, "reward") as backbone:
            return evaluate_reward(run, backbone, roles.head("reward"), pairs)
    # Before training the policy's backbone holds the starting model's weights; no second copy is needed.
    if folder == start:
        backbone = roles.backbone("policy")
    else:
        backbone = load_backbone(run, folder)
        shard(run, backbone)
    with as_config_errors(str(folder)):
        head = make_head(backbone, weights)
    with use_adapter(lora_layers(backbone), None):
        return evaluate_reward(run, backbone, head, pairs)


def evaluate_reward(
    run: Run, backbone: PreTrainedModel, head: ScalarHead, pairs: list[PreferencePair]
) -> RewardReport:
    """Score pairs with a head on the backbone in its current role."""
    longest = max(run.sizes.prompts) + max(*run.sizes.solutions, *run.sizes.rejected)
    n_tokens = tokens_per_pass(run, passes_of(run, backbone), checkpoints=True)
    batch_size = max(n_tokens // longest, 1)
    with track("reward", len(pairs)) as advance, run.fabric.autocast():
        return score_pairs(backbone, head, run.tokenizer, pairs, batch_size, on_scored=advance)
