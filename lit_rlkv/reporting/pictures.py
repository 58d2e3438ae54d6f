"""Figures of a report by section, each with a name and a caption on how to read it."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import curves, divergence, kept_keys, metric_curves
from lit_rlkv.reporting.plots.metric_curves import CurveSet
from lit_rlkv.reporting.run_folder import RunReport
from lit_rlkv.reporting.run_metrics import History
from lit_rlkv.reporting.tables import reward_sentence
from lit_rlkv.units import human_seconds

log = logging.getLogger(__name__)

TRAINING, SFT, EVALUATION = "Training", "SFT", "Evaluation"
MISMATCH, CACHE, COST = "Mismatch", "Cache", "Cost"
"""Sections of the page; SFT is a part of Training."""


class Picture(NamedTuple):
    """A figure with its name and caption."""

    figure: Figure
    name: str
    caption: str
    section: str = ""

    @property
    def key(self) -> str:
        """Name for loggers, such as figures/cache_fill."""
        return "figures/" + re.sub(r"\W+", "_", self.name.lower())


class Plan(NamedTuple):
    """A picture that is still to be drawn."""

    draw: Callable[[], Figure]
    name: str
    caption: str


def figures(report: RunReport) -> list[Picture]:
    """Return all pictures for which the run has data. One that cannot be drawn costs a warning."""
    sections = {
        TRAINING: _training(report),
        SFT: _curves(metric_curves.SFT, report.sft_history),
        EVALUATION: _evaluation(report),
        MISMATCH: _mismatch(report),
        CACHE: _cache(report),
        COST: _cost(report),
    }
    return [picture for section, plans in sections.items() for picture in draw_all(section, plans)]


def draw_all(section: str, plans: Iterable[Plan]) -> Iterator[Picture]:
    """Draw the pictures of a section; a figure that fails is left out, as no report may end a run."""
    name = "first"
    try:
        for plan in plans:
            name = plan.name
            try:
                picture = Picture(plan.draw(), plan.name, plan.caption, section)
            except Exception as error:
                log.warning("the figure %r cannot be drawn: %s: %s", name, type(error).__name__, error)
            else:
                yield picture
    except Exception as error:
        log.warning("no figures of %s after %r: %s: %s", section, name, type(error).__name__, error)


def _curves(sets: Iterable[CurveSet], history: History) -> Iterator[Plan]:
    for one in sets:
        if one.logged(history):
            yield Plan(partial(metric_curves.draw_metrics, one, history), one.title, one.caption)


def _training(report: RunReport) -> Iterator[Plan]:
    history = report.history
    if report.is_logged("reward"):
        yield Plan(
            partial(curves.reward_curve, history),
            "Reward",
            "Mean reward of the rollouts, sampled under the run's own cache. The band is the std of rewards "
            "among the responses to one prompt; at 0 there is no learning signal.",
        )
    if report.is_logged("rewards/learned"):
        yield Plan(
            partial(curves.proxy_and_gold, history),
            "Proxy and gold",
            "Proxy: the learned reward that is trained on. Gold: the verifier's score. If only the proxy "
            "rises, the policy exploits the reward model.",
        )
    yield from _curves(metric_curves.TRAINING, history)


def _evaluation(report: RunReport) -> Iterator[Plan]:
    if report.before or report.after:
        yield Plan(
            partial(curves.accuracy_against_budget, report.before, report.after),
            "Accuracy against budget",
            "The distance from a point up to the dashed line of its colour is the cost of eviction. Whiskers "
            "and bands are 95% Wilson intervals.",
        )
    quality = report.reward_model
    if quality is not None and report.uses_learned_reward:
        yield Plan(
            lambda: curves.reliability(quality.bin_confidence, quality.bin_accuracy, quality.bin_counts),
            "Calibration of the reward model",
            f"{reward_sentence(quality)}. Below the diagonal on the right it is overconfident.",
        )


def _mismatch(report: RunReport) -> Iterator[Plan]:
    if report.is_logged(*curves.MISMATCHES):
        yield Plan(
            partial(curves.mismatch, report.history),
            "Mismatch of sampler and learner",
            "Lower is better. k1 and k3 are two estimates of one KL. A replay gap (largest difference of a "
            "log-prob) far below the other lines means exact replay.",
        )
    if mismatches := report.measured("mismatch"):
        last = mismatches[-1]
        when = f"In iteration {last['iteration']}"
        yield Plan(
            partial(divergence.mismatch_by_position, last),
            "Mismatch by position",
            f"{when}: distance of the sampler from a policy that sees every key. It starts where keys are "
            "first evicted. A percentile far above the mean: few tokens carry it.",
        )
        yield Plan(
            partial(divergence.overlap_by_position, last),
            "Overlap by position",
            f"{when}: the probability that both distributions give to the same tokens. Where the 5th "
            "percentile falls to 0, the dense policy would not sample some of the responses.",
        )
        yield Plan(
            partial(divergence.weights_by_position, last),
            "Why reweighting explodes with length",
            f"{when}: the weight of a response is a product over its tokens, so the spread of its log grows "
            "with the length, and the share of responses that count falls.",
        )
    if layers := report.measured("layers"):
        yield Plan(
            partial(divergence.layer_mismatch, layers[0], layers[-1]),
            "Which layer's eviction matters",
            "A bar is the effect of the evictions of one layer alone; the dashed line is that of all layers "
            "together.",
        )
    if report.is_logged("kv/arms/tis/ess"):
        yield Plan(
            partial(curves.effective_samples, report.history),
            "What is left after a correction",
            "Effective sample size after weighting the same rollouts: by ρ of each token, by the product Π ρ "
            "of a response, or as the arms tis, mis and sparse_rl do. Replay needs no weights.",
        )
    if report.is_logged("kv/arms/mis/rejected", "kv/arms/tis/clipped"):
        yield Plan(
            partial(curves.rejected_tokens, report.history),
            "What each correction rejects or clips",
            "Rejected tokens have weight 0 and are not learned from; a clipped weight leaves bias.",
        )


def _cache(report: RunReport) -> Iterator[Plan]:
    if report.evictions is not None:
        yield Plan(
            partial(kept_keys.cache_fill, report.evictions["fill"], report.budget, report.interval),
            "Cache fill",
            "After every interval decode steps a cache above its budget is compacted to it, so it never "
            "holds more than budget + interval keys. A dense cache grows with the text. The prompt is read "
            "before any key is evicted.",
        )
    if retained := report.measured("cache"):
        last = retained[-1]
        when = f"In iteration {last['iteration']}"
        yield Plan(
            partial(kept_keys.attention_on_evicted, last),
            "Evicted and later needed",
            f"{when}: attention of the dense policy on evicted keys; near 0, eviction removed only keys that "
            "are not used.",
        )
        yield Plan(
            partial(kept_keys.attention_kept, last),
            "Attention that eviction left",
            f"{when}: share of each head's dense attention that is on cached keys, mean over queries.",
        )
        yield Plan(
            partial(kept_keys.attention_kept, last, "attention_kept_p05"),
            "Attention left for the worst queries",
            f"{when}: the same for the queries with the lowest share (5th percentile).",
        )
        yield Plan(
            partial(kept_keys.ages_at_eviction, last),
            "Age of keys at their eviction",
            f"{when}: tokens from writing a key to its eviction; a policy that keeps recent keys evicts at "
            "one age.",
        )
        yield Plan(
            partial(kept_keys.median_ages, last),
            "Median age by head",
            f"{when}: a head with a high median keeps old keys; an empty cell evicted none.",
        )
    if report.evictions is not None:
        yield Plan(
            partial(kept_keys.key_lifetimes, report.evictions["lifetimes"]),
            "Key lifetimes in one sequence",
            "A bar is one key, from its own token to the first query that no longer sees it. Compare panels "
            "to see which heads keep keys that others evict.",
        )


def _cost(report: RunReport) -> Iterator[Plan]:
    if report.stage_seconds:
        total = human_seconds(sum(report.stage_seconds.values()))
        yield Plan(
            partial(curves.time_per_stage, report.stage_seconds),
            "Time per stage",
            f"Each bar is the wall-clock time of one stage; {total} in all.",
        )
    if not report.is_logged("time/rollout"):
        return
    yield Plan(
        partial(curves.time_per_phase, report.history),
        "Time per phase",
        "Seconds of an iteration: sampling (rollout), log-probs of the roles (score), the verifier and "
        "reward functions (reward), optimizer steps (update); diagnostics on top.",
    )
    yield from _curves(metric_curves.COST, report.history)
    if report.is_logged(*(f"memory/rollout/{kind}" for kind in curves.MEMORY)):
        yield Plan(
            partial(curves.memory_per_phase, report.history),
            "Memory per phase",
            "Peak memory of each phase, including earlier allocations. A line that rises is a leak, or "
            "responses that grow.",
        )
