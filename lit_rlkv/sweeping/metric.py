"""The metric that a sweep compares its runs by, and the check that its runs log it."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from hydra.utils import get_object

from lit_rlkv.checks import Number
from lit_rlkv.config import Config, ConfigError
from lit_rlkv.config.options import option
from lit_rlkv.reporting.run_metrics import FINAL_METRICS

DICTIONARY = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
"""Names of all metrics; the file stands beside the package in a clone, and is not part of a wheel."""
MEASURED = {
    "mismatch": "kv/(dense|overlap|arms).+",
    "layers": "kv/layer_kl/.+",
    "gradient": "gradient/(policy|loss)/.+|variance_proxy/.+",
    "gradient_sources": "gradient/(sources|counterfactual)/.+",
    "cache": "kv/(retained|never_evicted|affected|lifetime|attention|needs_dead|dead_key).*",
    "performance": "(memory|perf)/.+|time/(rollout|score|reward)",
}
"""Patterns of the names that each diagnostic logs."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric that runs log, and which of its values are better."""

    name: str = option(MISSING, "metric to compare runs by, such as eval/accuracy")
    goal: Literal["minimize", "maximize"] = option("minimize", "which values are better")
    target: Number | None = option(None, "no new run starts once one is as good as this")

    @property
    def is_final(self) -> bool:
        """True if only the final evaluation logs the metric."""
        return self.name in FINAL_METRICS

    def cost(self, value: Number) -> Number:
        """Return the value with the sign for which lower is better."""
        return -value if self.goal == "maximize" else value

    def is_reached(self, value: Number) -> bool:
        """True if a value is as good as the target."""
        return self.target is not None and self.cost(value) <= self.cost(self.target)


def check_metric(metric: Metric, cfg: Config, *, is_watched: bool) -> None:
    """Check that a run of this config logs the metric, as far as that is known.

    Args:
        is_watched: True if early stopping needs the metric while the run trains.

    Raises:
        ConfigError: the run would never log it.
    """
    stages = list(cfg.stages)
    if metric.is_final:
        if is_watched:
            raise ConfigError(
                f"metric={metric.name} is logged only at a run's end, too late for early_terminate; use one "
                "of every iteration, such as reward, or leave early_terminate out"
            )
        needed = ["rl", "eval"] if metric.name.endswith("_gain") else ["eval"]
        if not set(needed) <= set(stages):
            raise ConfigError(
                f"metric={metric.name} needs {' and '.join(needed)} in stages={stages}; add them"
            )
    elif "rl" not in stages:
        raise ConfigError(f"metric={metric.name} is logged by rl, which is not in stages={stages}; add it")
    else:
        _check_name(metric.name)
    for names, is_logged, remedy in _conditions(cfg):
        if not is_logged and re.fullmatch(names, metric.name):
            raise ConfigError(
                f"metric={metric.name} is not logged with these settings; {remedy}, or use another metric"
            )


def _check_name(name: str) -> None:
    known = logged_names()
    if known and not any(pattern.fullmatch(name) for pattern in known.values()):
        close = get_close_matches(name, [*FINAL_METRICS, *known], n=1)
        hint = f"did you mean {close[0]!r}?" if close else "docs/reference/metrics.md lists them"
        raise ConfigError(f"metric={name!r} is logged by no run in rl or eval; {hint}")


def _conditions(cfg: Config) -> Iterator[tuple[str, bool, str]]:
    """Yield names that not every run logs, True if this config does, and how to make it log them."""
    from lit_rlkv.experience.advantages import PairAdvantage
    from lit_rlkv.runs.preflight import needed_roles

    roles, kl, distillation = needed_roles(cfg), cfg.algorithm.kl, cfg.distillation
    has_pairs = get_object(cfg.algorithm.loss._target_).advantage_estimator is PairAdvantage
    yield "policy_loss|approx_kl|clip_ratio/.+", not has_pairs, "choose an algorithm other than online_dpo"
    of_pairs = "dpo_loss|logps/.+|rewards/(chosen|rejected|margins|accuracies)"
    yield of_pairs, has_pairs, "choose algorithm=online_dpo"
    yield "value_loss|value/.+", "value" in roles, "choose algorithm=ppo"
    yield "rewards/learned|eval/learned_reward", "reward" in roles, "raise reward.learned"
    yield (
        "rewards/[^/]+/(mean|std)|reward/failed_fraction",
        bool(cfg.reward.functions),
        "add reward.functions",
    )
    yield "objective/.+", "reference" in roles, "raise algorithm.kl.weight"
    in_loss = kl.weight > 0 and kl.place == "loss"
    yield "kl", in_loss, "raise algorithm.kl.weight, with algorithm.kl.place=loss"
    for names, key in {"smd/(kl|loss)": "weight", "smd/anchor/.+": "anchor_weight"}.items():
        has_term = distillation is not None and distillation.get(key, 0) > 0
        yield names, has_term, f"choose a distillation with distillation.{key} above 0"
    replays = cfg.correction.replays
    yield "kv/replay_gap", replays, "choose correction=shadow"
    scores_replay = replays and not cfg.correction.get("bypass_mode", False)
    yield (
        "kv/replay_gap_(mean|p99|max)",
        scores_replay,
        "choose correction=shadow correction.bypass_mode=false",
    )
    measured = {get_object(node._target_).name for node in cfg.diagnostics.values() if node is not None}
    for name, names in MEASURED.items():
        yield f"{names}|time/diagnostics/{name}", name in measured, f"switch diagnostics.{name} on"


def logged_names() -> dict[str, re.Pattern[str]]:
    """Return a pattern for each name of RL and evaluation in metrics.md, where `{x}` is any name.

    Empty without the file.
    """
    if not DICTIONARY.is_file():
        return {}
    text, _, _of_sft = DICTIONARY.read_text().partition("## SFT stage")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    return {name: re.compile(re.sub(r"\\{.+?\\}", "[^/]+", re.escape(name))) for name in names}
