"""Curves of logged metrics over the iterations, accuracies against the budget, calibration of a reward head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from lit_rlkv.evaluation.intervals import accuracy_interval
from lit_rlkv.evaluation.results import N_BINS, EvalRow
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.plots.style import Dashes
from lit_rlkv.reporting.run_metrics import History

MIB = 2**20
MANY = 1000
"""Values from which ticks have a separator of thousands."""
CORRECTION_STYLES = {
    "token_ratio": ("ρ of tokens", style.BLUE),
    "sequence_ratio": ("Π ρ of responses", style.VERMILLION),
    "tis": ("tis", style.GREEN),
    "mis": ("mis", style.PURPLE),
    "sparse_rl": ("sparse_rl", style.ORANGE),
}
"""Legend name and colour of each correction."""


@dataclass(frozen=True)
class CurveSet:
    """Metrics of one unit, which one figure shows of a run, and a figure each of several runs."""

    title: str
    caption: str
    y_label: str
    metrics: Mapping[str, str]
    """Legend entry of each metric."""
    axis: Literal["free", "from zero", "percent", "share", "log", "log percent"] = "free"
    scale: float = 1.0
    """Factor from the logged unit to that of the axis."""

    def logged(self, *histories: History) -> list[str]:
        """Return those metrics that any of the runs has logged."""
        return [name for name in self.metrics if any(len(style.series(h, name)[0]) for h in histories)]


REWARD = CurveSet(
    "Reward",
    "Mean reward of the rollouts, sampled under the run's own cache, and the std of rewards among the responses "
    "to one prompt; at a std of 0 there is no learning signal.",
    "Reward",
    {"reward": "mean", "reward_std": "std in a group"},
)
GOLD = CurveSet(
    "Proxy and gold",
    "Gold: the verifier's score. Proxy: a learned reward that is trained on. If only the proxy rises, the policy "
    "exploits the reward model.",
    "Score",
    {"rewards/exact_match": "gold", "rewards/learned": "proxy"},
)

TRAINING = (
    CurveSet(
        "Loss",
        "Terms of the loss as they add up. A policy loss near 0 is normal: advantages have mean 0.",
        "Loss",
        {
            "loss": "sum",
            "policy_loss": "policy",
            "dpo_loss": "DPO",
            "value_loss": "critic",
            "smd/loss": "distillation",
            "smd/anchor/loss": "anchor to the reference",
        },
    ),
    CurveSet(
        "Entropy",
        "Entropy of the policy at a response token. Near 0 early in training it no longer explores.",
        "Entropy (nats per token)",
        {"entropy": "entropy"},
        "from zero",
    ),
    CurveSet(
        "Response length",
        "Tokens per response, the end of sequence included. A mean at the limit means truncated responses.",
        "Tokens",
        {
            "completions/mean_length": "mean",
            "completions/max_length": "longest",
            "completions/min_length": "shortest",
        },
        "from zero",
    ),
    CurveSet(
        "Responses without a signal",
        "Truncated: no end of sequence before the limit. A group is the responses to one prompt; if their "
        "rewards are equal, their advantages are 0.",
        "Share",
        {
            "completions/clipped_ratio": "truncated responses",
            "frac_reward_zero_std": "groups of equal rewards",
        },
        "share",
    ),
    CurveSet(
        "Gradient norm",
        "L2 norm before clipping; algorithm.max_grad_norm is where clipping begins.",
        "Norm",
        {"grad_norm": "gradient norm"},
        "from zero",
    ),
    CurveSet(
        "Gradient signal to noise",
        "SNR: squared norm of the mean gradient over the gradient's variance between rollouts. Far below 1, "
        "updates are mostly noise; single estimates may be negative.",
        "SNR",
        {"gradient/policy/snr": "policy's objective", "gradient/loss/snr": "whole policy loss"},
    ),
    CurveSet(
        "Learning rate",
        "Of the first parameter group, after the iteration's last step.",
        "Learning rate",
        {"learning_rate": "learning rate"},
        "from zero",
    ),
    CurveSet(
        "Clipped tokens",
        "Clip ratio: share of response tokens whose update stops at the bound of the clipped objective. "
        "Above 20%, steps are too large.",
        "Share of the tokens",
        {"clip_ratio/low_mean": "at the lower bound", "clip_ratio/high_mean": "at the upper bound"},
        "percent",
    ),
    CurveSet(
        "KL per token",
        "Distance of the policy from what it was before the iteration's updates, and from the reference (the "
        "model that training starts from).",
        "KL (nats)",
        {"approx_kl": "from before the updates", "kl": "from the reference"},
        "log",
    ),
    CurveSet(
        "KL to the reference per response",
        "KL(π ‖ π_ref) summed over a response, before the iteration's updates: an estimate (k1) by sampled "
        "tokens, which may be negative near 0.",
        "KL (nats per response)",
        {"objective/kl": "KL to the reference"},
    ),
    CurveSet(
        "Critic",
        "Share of the returns' variance that the critic explains: 1 is perfect, 0 no better than a constant.",
        "Explained variance",
        {"value/explained_variance": "explained variance"},
    ),
    CurveSet(
        "Preference accuracy",
        "Share of pairs whose better response has the higher implicit reward, β · (log π − log π_ref).",
        "Share of the pairs",
        {"rewards/accuracies": "accuracy"},
        "share",
    ),
)
"""Figures of the RL stage, beside the reward; one whose metrics were not logged is left out."""

SFT = (
    CurveSet(
        "Loss of SFT",
        "Supervised fine-tuning before RL: cross-entropy of worked solutions, and the reward head's "
        "loss on pairs, which is 0.69 by guessing.",
        "Loss (nats)",
        {"lm_loss": "language model, per token", "reward_loss": "reward head, per pair"},
        "from zero",
    ),
    CurveSet(
        "Accuracy of the reward head",
        "Share of training pairs in which the better response gets the higher score; 50% by guessing.",
        "Accuracy",
        {"pair_accuracy": "pairs ranked right"},
        "share",
    ),
)
"""Figures of the SFT stage, from sft_metrics.csv."""

MISMATCH = CurveSet(
    "Mismatch of sampler and learner",
    "Lower is better. μ: the sampler under its evicting cache; k3: an estimate of the KL that is never negative. A "
    "replay gap (largest difference of a log-prob) far below the other lines means exact replay.",
    "Mismatch (nats)",
    {
        "rollout_corr/k3_kl": "KL(μ ‖ learner), k3",
        "kv/dense_k3_kl": "KL(μ ‖ dense policy), k3",
        "smd/kl": "distillation KL",
        "kv/replay_gap": "replay gap",
    },
    "log",
)
CORRECTIONS = (
    CurveSet(
        "What is left after a correction",
        "Effective sample size after weighting the same rollouts: by ρ of each token, by the product Π ρ of a "
        "response, or as the arms tis, mis and sparse_rl do. Replay needs no weights.",
        "Effective share of the tokens",
        {f"kv/arms/{name}/ess": label for name, (label, _) in CORRECTION_STYLES.items()},
        "log percent",
    ),
    CurveSet(
        "What each correction rejects or clips",
        "Rejected tokens have weight 0 and are not learned from; a clipped weight leaves bias.",
        "Share of the response tokens",
        {
            "kv/arms/mis/rejected": "mis rejects",
            "kv/arms/sparse_rl/rejected": "sparse_rl rejects",
            "kv/arms/tis/clipped": "tis clips",
        },
        "percent",
    ),
)
"""What remains of the same rollouts after each correction of the mismatch."""

COST = (
    CurveSet(
        "Time per phase",
        "Seconds of an iteration: sampling (rollout), log-probs of the roles (score), the verifier and reward "
        "functions (reward), optimizer steps (update).",
        "Seconds",
        {f"time/{phase}": phase for phase in ("rollout", "score", "reward", "update")},
        "from zero",
    ),
    CurveSet(
        "Speed",
        "Tokens a second: sampled in the rollout, and in backward passes of the update.",
        "Tokens per second",
        {"perf/tokens_per_second/rollout": "rollout", "perf/tokens_per_second/update": "update"},
        "from zero",
    ),
    CurveSet(
        "Cache",
        "Allocated keys and values of a rollout.",
        "MiB",
        {"kv/bytes": "cache"},
        "from zero",
        scale=1 / MIB,
    ),
    CurveSet(
        "Memory per phase",
        "Peak memory of each phase, including earlier allocations: of CUDA's allocator, or elsewhere resident. A "
        "line that rises is a leak, or responses that grow.",
        "MiB at most",
        {
            f"memory/{phase}/{kind}": phase
            for kind in ("peak", "resident_peak")
            for phase in ("rollout", "score", "update")
        },
        "from zero",
        scale=1 / MIB,
    ),
)
"""Costs of the RL stage."""


def draw_metrics(curves: CurveSet, history: History) -> Figure:
    """Draw the logged metrics of one run; a thick line is the mean of the last SMOOTHING iterations."""
    figure, axes = style.single_axes("Iteration", curves.y_label)
    for (name, label), color in zip(curves.metrics.items(), style.PALETTE, strict=False):
        _draw(axes, history, name, curves, color, label)
    if len(curves.metrics) > 1:  # else the name of the curve is that of the figure
        style.legend(axes)
    return _finish(figure, axes, curves)


def draw_runs(curves: CurveSet, metric: str, histories: Mapping[str, History]) -> Figure:
    """Draw one metric of several runs; a run's colour is its place in `histories`."""
    figure, axes = style.single_axes("Iteration", curves.y_label)
    for place, (run, history) in enumerate(histories.items()):
        _draw(axes, history, metric, curves, style.run_color(place), run, style.run_dashes(place))
    style.legend(axes)
    return _finish(figure, axes, curves)


def _draw(
    axes: Axes, history: History, name: str, curves: CurveSet, color: str, label: str, dashes: Dashes = "-"
) -> None:
    iteration, value = style.series(history, name)
    if len(value) == 0:
        return
    value = curves.scale * value
    if curves.axis.startswith("log"):
        if not (value > 0).any():
            label += ": negative, not drawn" if (value < 0).any() else ": 0 throughout"
        value = np.where(value > 0, value, np.nan)
    is_long = len(value) > 2 * style.SMOOTHING and not curves.axis.startswith("log")
    if is_long:
        axes.plot(iteration, value, color=color, lw=0.8, alpha=0.35)
        value = style.trailing_mean(value)
    axes.plot(iteration, value, color=color, lw=1.7, ls=dashes, marker=style.marker(value), label=label)


def _finish(figure: Figure, axes: Axes, curves: CurveSet) -> Figure:
    if curves.axis == "share":
        style.share_axis(axes)
    elif curves.axis.startswith("log"):
        style.log_decades(axes)
    elif curves.axis != "free":
        highest = np.nanmax(style.line_heights(axes), initial=0.0)
        axes.set_ylim(0, 1.08 * highest or (0.01 if curves.axis == "percent" else 1.0))
        if highest >= MANY:
            axes.yaxis.set_major_formatter("{x:,.0f}")
    if curves.axis.endswith("percent"):
        axes.yaxis.set_major_formatter(style.small_percent)
    style.integer_x_axis(axes)
    return figure


def accuracy_against_budget(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> Figure:
    """Draw the accuracy at each cache budget; a dashed line is the same model with a dense cache."""
    is_single = not before or not after
    evaluations = {"before": before, "after": after}
    colors = {"before": style.MUTED, "after": style.BLUE}
    shown = {"" if is_single else name: rows for name, rows in evaluations.items() if rows}
    return accuracies(shown, [colors[name] for name, rows in evaluations.items() if rows])


def accuracies(evaluations: Mapping[str, Sequence[EvalRow]], colors: Sequence[str]) -> Figure:
    """Draw the accuracy of several evaluations at each cache budget, with 95% Wilson intervals.

    A dashed line, with a band for its interval, is a dense cache.

    Args:
        evaluations: rows by the name in the legend; an empty name is a single evaluation.
    """
    figure, axes = style.single_axes("Budget (keys per sequence, layer and KV head)", "Accuracy")
    budgets = sorted({row.budget for rows in evaluations.values() for row in rows if row.budget is not None})
    for (name, rows), color, marker in zip(evaluations.items(), colors, "soD^vPX" * 9, strict=False):
        sparse = sorted((row.budget, row.accuracy) for row in rows if row.budget is not None)
        if sparse:
            x, y = zip(*sparse, strict=True)
            axes.plot(x, y, color=color, marker=marker, ms=4.5, lw=1.8, label=name or "under the budget")
        for row in rows:
            interval = accuracy_interval(row)
            if row.budget is not None and interval:
                sizes = [[row.accuracy - interval.low], [interval.high - row.accuracy]]
                axes.errorbar(
                    row.budget, row.accuracy, sizes, fmt="none", color=color, elinewidth=1.2, capsize=3
                )
            if row.budget is None:
                label = f"dense, {name}" if name else "dense"
                axes.axhline(row.accuracy, color=color, lw=1.2, ls=style.DASHED, label=label, zorder=1.5)
                if interval:
                    axes.axhspan(interval.low, interval.high, color=color, alpha=0.1, lw=0, zorder=1)
    style.share_axis(axes)
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xlim(budgets[0] / 1.15, budgets[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    style.legend(axes)
    return figure


def reliability(confidence: Sequence[float], accuracy: Sequence[float], counts: Sequence[int]) -> Figure:
    """Draw the accuracy of a reward head against its confidence; a calibrated head lies on the diagonal.

    Args:
        confidence: mean P(first is better) of each non-empty bin, in ascending order.
        accuracy: share of comparisons in which the first is better, of each bin.
        counts: comparisons in each bin; bars show their shares.
    """
    figure, axes = style.single_axes("Predicted: the first is better", "Observed")
    share = np.array(counts) / np.sum(counts)
    place = np.minimum(np.floor(np.array(confidence) * N_BINS), N_BINS - 1)
    axes.bar(
        (place + 0.5) / N_BINS, share, width=0.9 / N_BINS, color=style.SAND, label="share of comparisons"
    )
    axes.plot([0, 1], [0, 1], color=style.MUTED, lw=1.2, ls=style.DASHED, label="calibrated")
    axes.plot(confidence, accuracy, color=style.BLUE, marker="o", ms=5, lw=1.8, label="reward head")
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(style.PERCENT)
    style.legend(axes)
    return figure
