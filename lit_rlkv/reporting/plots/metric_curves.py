"""Curves of logged metrics over the iterations: what a figure shows of one run or of several."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.plots.style import Dashes
from lit_rlkv.reporting.run_metrics import History

MANY = 1000
"""Values from which ticks have a separator of thousands."""


@dataclass(frozen=True)
class CurveSet:
    """Metrics of one unit, which one figure shows of a run, and a figure each of several runs."""

    title: str
    caption: str
    y_label: str
    metrics: Mapping[str, str]
    """Legend entry of each metric."""
    axis: Literal["free", "from zero", "percent", "share", "log"] = "free"
    scale: float = 1.0
    """Factor from the logged unit to that of the axis."""

    def logged(self, *histories: History) -> list[str]:
        """Return those metrics that any of the runs has logged."""
        return [name for name in self.metrics if any(len(style.series(h, name)[0]) for h in histories)]


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

COST = (
    CurveSet(
        "Speed",
        "Tokens a second: sampled in the rollout, and in backward passes of the update.",
        "Tokens per second",
        {"perf/tokens_per_second/rollout": "rollout", "perf/tokens_per_second/update": "update"},
        "from zero",
    ),
)
"""Costs that are curves of a metric."""


def draw_metrics(curves: CurveSet, history: History) -> Figure:
    """Draw the logged metrics of one run; a thick line is the mean of the last SMOOTHING iterations."""
    figure, axes = style.single_axes("Iteration", curves.y_label)
    for name, color in zip(curves.logged(history), style.PALETTE, strict=False):
        _draw(axes, history, name, curves, color, curves.metrics[name])
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
    if curves.axis == "log":
        if not (value > 0).any():
            label += ": negative, not drawn" if (value < 0).any() else ": 0 throughout"
        value = np.where(value > 0, value, np.nan)
    is_long = len(value) > 2 * style.SMOOTHING and curves.axis != "log"
    if is_long:
        axes.plot(iteration, value, color=color, lw=0.8, alpha=0.35)
        value = style.trailing_mean(value)
    axes.plot(iteration, value, color=color, lw=1.7, ls=dashes, marker=style.marker(value), label=label)


def _finish(figure: Figure, axes: Axes, curves: CurveSet) -> Figure:
    if curves.axis == "share":
        style.share_axis(axes)
    elif curves.axis == "log":
        style.log_decades(axes)
    elif curves.axis != "free":
        highest = np.nanmax(style.line_heights(axes), initial=0.0)
        axes.set_ylim(0, 1.08 * highest or (0.01 if curves.axis == "percent" else 1.0))
        if highest >= MANY:
            axes.yaxis.set_major_formatter("{x:,.0f}")
    if curves.axis == "percent":
        axes.yaxis.set_major_formatter(style.small_percent)
    style.integer_x_axis(axes)
    return figure
