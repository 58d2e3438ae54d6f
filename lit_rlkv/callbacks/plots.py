"""Figures of a run: pure functions from what was measured to matplotlib figures, without pyplot."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter
from torch import Tensor

from lit_rlkv.data.reward_evaluation import N_BINS
from lit_rlkv.types import NEVER, EvalRow, Rollout

History = Sequence[Mapping[str, float | int]]
"""Logged metrics, one mapping per iteration; "iteration" is always there, a metric may be missing."""

MISMATCHES = {
    "rollout_corr/kl": "KL(μ ‖ learner), k1",
    "rollout_corr/k3_kl": "KL(μ ‖ learner), k3",
    "smd/kl": "distillation KL",
    "kv/replay_gap": "replay gap",
}
"""Metrics that the mismatch figure draws where they were logged, and their names in its legend."""

SMOOTHING = 10
"""Iterations that the moving average of the reward looks back on."""

MAX_PANELS = 4
"""Layers, and heads, at most in the picture of lifetimes."""

MAX_LABELLED_TOKENS = 64
"""Longest sequence whose tokens are written beside their lifetimes."""

MAX_LABEL_CHARACTERS = 10
"""Longest token written whole there."""

HALF_WIDTH, FULL_WIDTH, HEIGHT = 5.2, 10.4, 3.2
"""Inches at 100 pixels per inch: two figures side by side in a report, one across it."""

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e3e6eb"
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"  # of Okabe and Ito
SAND = "#f0c890"
_SMALL, _NORMAL = 8, 9


def reward_curve(history: History) -> Figure:
    """Mean reward of each iteration, its moving average, and the spread of rewards around that average."""
    figure, axes = _single("Iteration", "Mean reward")
    iteration, reward = series(history, "reward")
    if len(reward) == 0:
        return _nothing(figure, axes, "no reward was logged")
    smooth = _trailing_mean(reward)
    spread_at, spread = series(history, "reward_std")
    if np.array_equal(spread_at, iteration):
        band = _trailing_mean(spread)
        axes.fill_between(
            iteration, smooth - band, smooth + band, color=BLUE, alpha=0.13, lw=0, label="± reward std"
        )
    axes.plot(iteration, reward, color=BLUE, lw=0.8, alpha=0.5, label="each iteration")
    axes.plot(iteration, smooth, color=BLUE, lw=2, label=f"mean of the last {SMOOTHING}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return figure


def proxy_and_gold(history: History) -> Figure:
    """The verifier's score of the rollouts on the left axis, what the reward model thinks on the right."""
    figure, axes = _single("Iteration", "Verifier's score (gold)")
    learned_at, learned = series(history, "rewards/learned")
    gold_at, gold = series(history, "rewards/exact_match")
    if len(learned) == 0:
        return _nothing(figure, axes, "no reward model was asked")
    right = axes.twinx()
    right.set_ylabel("Learned reward (proxy)", color=VERMILLION, size=_NORMAL)
    right.tick_params(colors=VERMILLION, labelsize=_SMALL, length=0)
    right.spines[:].set_visible(False)
    for at, value, side, color, name in (
        (gold_at, gold, axes, BLUE, "gold, left axis"),
        (learned_at, learned, right, VERMILLION, ""),
    ):
        if len(value):
            side.plot(at, value, color=color, lw=0.8, alpha=0.4)
            side.plot(at, _trailing_mean(value), color=color, lw=2, label=name or None)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.plot([], [], color=VERMILLION, lw=2, label="proxy, right axis")  # for the legend
    _legend(axes)
    return figure


def accuracy_against_budget(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> Figure:
    """Accuracy at each cache budget; a dashed line is the same model with all its keys."""
    figure, axes = _single("Budget (keys per sequence, layer and KV head)", "Accuracy")
    if not before and not after:
        return _nothing(figure, axes, "no evaluation was run")
    budgets = sorted({row.budget for row in (*before, *after) if row.budget is not None})
    is_single = not before or not after
    for rows, name, color, marker in ((before, "before", MUTED, "s"), (after, "after", BLUE, "o")):
        label, dense_label = ("under the budget", "dense") if is_single else (name, f"dense, {name}")
        sparse = sorted((row.budget, row.accuracy) for row in rows if row.budget is not None)
        if sparse:
            axes.plot(*zip(*sparse, strict=True), color=color, marker=marker, ms=5, lw=1.8, label=label)
        for row in rows:
            if row.budget is None:
                axes.axhline(row.accuracy, color=color, lw=1.2, ls=(0, (5, 3)), label=dense_label, zorder=1.5)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_minor_locator(NullLocator())
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xlim(budgets[0] / 1.15, budgets[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    _legend(axes)
    return figure


def mismatch(history: History) -> Figure:
    """How far sampler and learner are apart, on a log axis.

    A negative estimate is drawn at its size with an open circle; an exact 0 leaves a gap in its line.
    """
    figure, axes = _single("Iteration", "Mismatch (nats)")
    for (metric, name), color in zip(MISMATCHES.items(), (BLUE, GREEN, PURPLE, VERMILLION), strict=True):
        iteration, value = series(history, metric)
        if len(value) == 0:
            continue
        size = np.where(value == 0, np.nan, np.abs(value))
        label = name if np.isfinite(size).any() else f"{name}: 0 throughout"
        axes.plot(iteration, size, color=color, lw=1.4, marker="." if len(value) == 1 else None, label=label)
        is_negative = value < 0
        if is_negative.any():
            at, negative = iteration[is_negative], size[is_negative]
            axes.plot(at, negative, "o", mfc="white", mec=color, ms=4, label=f"{name}, negative")
    if not axes.lines:
        return _nothing(figure, axes, "no mismatch was logged")
    shown = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    shown = shown[np.isfinite(shown)]
    if len(shown):
        axes.set_yscale("log")
        # Whole decades, so that there is a label on the axis however close the values are.
        axes.set_ylim(10 ** np.floor(np.log10(shown.min())), 10 ** (np.floor(np.log10(shown.max())) + 1))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, n_columns=2)
    return figure


def cache_fill(rollout: Rollout, budget: int | None = None, interval: int | None = None) -> Figure:
    """Live keys at each query, over all sequences, layers and heads, beside what a dense cache would hold."""
    figure, axes = _single("Tokens since the response began", "Live keys per layer and KV head")
    is_query = queries(rollout)
    column = torch.arange(is_query.shape[1]) - _response_start(rollout)
    is_shown = is_query.any(dim=0)
    if not is_shown.any():
        return _nothing(figure, axes, "the rollout is empty")
    x = column[is_shown].numpy()
    live = _over_queries(live_keys(rollout), is_query)[:, is_shown]
    dense = _over_queries(rollout.is_token.cpu().cumsum(dim=1)[:, None, None], is_query)[:, is_shown]
    low, high = np.nanmin(live, axis=0), np.nanmax(live, axis=0)
    axes.plot(x, np.nanmean(dense, axis=0), color=MUTED, lw=1.4, ls=(0, (5, 3)), label="dense, mean")
    axes.fill_between(x, low, high, color=BLUE, alpha=0.18, lw=0, label="live, least to most")
    axes.plot(x, np.nanmean(live, axis=0), color=BLUE, lw=2, label="live, mean")
    axes.axvline(0, color=INK, lw=0.8, ls=":")
    if budget is not None:
        _level(axes, budget, f"budget {budget}", "top")
    if budget is not None and interval is not None:
        _level(axes, budget + interval, f"slots {budget + interval}", "bottom")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return figure


def key_lifetimes(rollout: Rollout, row: int, token_labels: Sequence[str] | None = None) -> Figure:
    """One sequence, a panel per layer and KV head: each key's bar runs from its own token to its eviction.

    Args:
        token_labels: what to write beside each token of the row, padding not counted; unused on a long row.

    Raises:
        ValueError: a row that the rollout does not have, or not one label per token.
    """
    if not 0 <= row < len(rollout.token_ids):
        raise ValueError(f"row={row} is not in a rollout of {len(rollout.token_ids)}; give 0 to its size - 1")
    is_token = rollout.is_token[row].cpu()
    n_tokens = int(is_token.sum())
    if token_labels is not None and len(token_labels) != n_tokens:
        raise ValueError(
            f"{len(token_labels)} token_labels for {n_tokens} tokens in row {row}; give one per token"
        )
    n_keys = max(n_tokens - 1, 0)
    n_prompt = int((is_token & ~rollout.is_action[row].cpu()).sum())
    first = int(is_token.int().argmax())
    death = rollout.death[row].cpu()[..., is_token][..., :n_keys]
    layers, heads = (_evenly_chosen(size) for size in death.shape[:2])
    has_labels = token_labels is not None and n_tokens <= MAX_LABELLED_TOKENS
    figure, grid = _panels(len(layers), len(heads), n_keys if has_labels else 0)
    for axes_row, layer in zip(grid, layers, strict=True):
        for axes, head in zip(axes_row, heads, strict=True):
            _draw_lifetimes(axes, death[layer, head], first, n_prompt)
            axes.set_title(f"layer {layer} · head {head}", fontsize=_SMALL, color=INK, loc="left")
        if has_labels and token_labels is not None:
            shown = [_visible(label) for label in token_labels[:n_keys]]
            axes_row[0].set_yticks(np.arange(n_keys) + 0.5, shown, family="monospace", parse_math=False)
            axes_row[0].tick_params(axis="y", labelsize=6, length=0)
    figure.supxlabel("Query (token of the sequence)", fontsize=_NORMAL, color=INK)
    figure.supylabel("Key (token of the sequence)", fontsize=_NORMAL, color=INK)
    handles = [
        Patch(color=BLUE, label="kept to the end"),
        Patch(color=SAND, label="evicted"),
        *[line for line in grid[0][0].lines if line.get_label() == "response begins"][:1],
    ]
    legend = figure.legend(
        handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=_SMALL
    )
    _ink(legend.get_texts())
    return figure


def reliability(confidence: Sequence[float], accuracy: Sequence[float], counts: Sequence[int]) -> Figure:
    """How often a reward head that is so sure is right, in each bin; on the diagonal it knows its own limits.

    Args:
        confidence: mean P(first is better) of each bin that holds any comparisons, in ascending order.
        accuracy: how often the first was the better one.
        counts: comparisons; the bars are their shares.
    """
    figure, axes = _single("Predicted: the first is better", "Observed")
    if not counts:
        return _nothing(figure, axes, "no pairs were scored")
    share = np.array(counts) / np.sum(counts)
    place = np.minimum(np.floor(np.array(confidence) * N_BINS), N_BINS - 1)
    axes.bar((place + 0.5) / N_BINS, share, width=0.9 / N_BINS, color=SAND, label="share of comparisons")
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1.2, ls=(0, (5, 3)), label="calibrated")
    axes.plot(confidence, accuracy, color=BLUE, marker="o", ms=5, lw=1.8, label="reward head")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    _legend(axes)
    return figure


def time_per_stage(stage_seconds: Mapping[str, float | int]) -> Figure:
    """Wall-clock seconds of each stage, in the order they ran."""
    figure, axes = _single("Seconds", "", height=0.9 + 0.34 * len(stage_seconds))
    if not stage_seconds:
        return _nothing(figure, axes, "no stage was timed")
    bars = axes.barh(list(stage_seconds), list(stage_seconds.values()), color=BLUE, height=0.6)
    axes.bar_label(bars, fmt="{:,.1f}", padding=4, fontsize=_SMALL, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelsize=_NORMAL, labelcolor=INK)
    return figure


def series(history: History, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations at which a metric was logged and finite, and its values there."""
    points = [(row["iteration"], row[metric]) for row in history if np.isfinite(row.get(metric, np.nan))]
    iteration, value = np.array(points, dtype=float).reshape(-1, 2).T
    return iteration, value


def live_keys(rollout: Rollout) -> Int[Tensor, "batch layer kv_head seq"]:
    """Keys born and not yet evicted at each column, by counts alone: births so far minus deaths so far."""
    is_token, death = rollout.is_token.cpu(), rollout.death.cpu()
    seq = death.shape[-1]
    is_key = is_token[:, None, None].expand_as(death).long()
    deaths = torch.zeros(*death.shape[:-1], seq + 1, dtype=torch.long)
    deaths.scatter_add_(-1, death.clamp(max=seq).long(), is_key)
    return is_token.long().cumsum(dim=1)[:, None, None] - deaths[..., :seq].cumsum(dim=-1)


def queries(rollout: Rollout) -> Bool[Tensor, "batch seq"]:
    """True where the sampler asked the cache: on every token but the last, which it wrote and never read."""
    is_token = rollout.is_token.cpu()
    has_later_token = is_token.flip(1).long().cumsum(dim=1).flip(1) > 1
    return is_token & has_later_token


def _over_queries(counts: Tensor, is_query: Tensor) -> np.ndarray:
    """[sequence × layer × head, column], NaN outside the queries."""
    values = counts.double().masked_fill(~is_query[:, None, None].expand_as(counts), torch.nan)
    return values.flatten(0, 2).numpy()


def _response_start(rollout: Rollout) -> int:
    is_response_column = rollout.is_action.any(dim=0).cpu()
    return int(is_response_column.long().argmax()) if is_response_column.any() else len(is_response_column)


def _trailing_mean(values: np.ndarray) -> np.ndarray:
    return np.array([values[max(0, end - SMOOTHING) : end].mean() for end in range(1, len(values) + 1)])


def _evenly_chosen(size: int) -> list[int]:
    """At most MAX_PANELS indices, from the first to the last."""
    return sorted({round(index) for index in np.linspace(0, size - 1, min(size, MAX_PANELS))})


def _visible(label: str) -> str:
    """A token as one short line: blanks and line breaks as signs, control characters as escapes."""
    signs = label.replace(" ", "␣").replace("\n", "⏎")
    escaped = "".join(character if character.isprintable() else repr(character)[1:-1] for character in signs)
    return escaped if len(escaped) <= MAX_LABEL_CHARACTERS else escaped[: MAX_LABEL_CHARACTERS - 1] + "…"


def _draw_lifetimes(axes: Axes, death: Int[Tensor, " seq"], first: int, n_prompt: int) -> None:
    n_keys = len(death)
    born = np.arange(n_keys)
    is_kept = (death == NEVER).numpy()
    end = np.where(is_kept, n_keys, death.numpy().astype(np.int64) - first)
    corners = np.stack(
        [
            np.stack([born, born + 0.08], -1),
            np.stack([end, born + 0.08], -1),
            np.stack([end, born + 0.92], -1),
            np.stack([born, born + 0.92], -1),
        ],
        axis=1,
    )
    colors = [BLUE if kept else SAND for kept in is_kept]
    axes.add_collection(PolyCollection(list(corners), facecolors=colors, linewidths=0))
    axes.axvline(n_prompt, color=INK, lw=0.8, ls=":", label="response begins")
    axes.axhline(n_prompt, color=INK, lw=0.8, ls=":")
    axes.set_xlim(0, max(n_keys, 1))
    axes.set_ylim(max(n_keys, 1), 0)


def _panels(n_rows: int, n_columns: int, n_labels: int) -> tuple[Figure, list[list[Axes]]]:
    height = max(min(FULL_WIDTH / n_columns, 2.4), 0.095 * n_labels)
    figure = Figure(figsize=(FULL_WIDTH, 0.8 + n_rows * (height + 0.25)), dpi=100, layout="constrained")
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat:
        _calm(axes)
        axes.grid(visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, grid.tolist()


def _single(x_label: str, y_label: str, height: float | int = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(HALF_WIDTH, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    _calm(axes)
    axes.set_xlabel(x_label, fontsize=_NORMAL, color=INK)
    axes.set_ylabel(y_label, fontsize=_NORMAL, color=INK)
    return figure, axes


def _calm(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=GRID, lw=0.8)
    axes.tick_params(labelsize=_SMALL, labelcolor=MUTED, color=GRID)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(GRID)


def _legend(axes: Axes, n_columns: int = 3) -> None:
    """Above the axes, where it hides no data."""
    n_entries = len(axes.get_legend_handles_labels()[0])
    legend = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=n_entries if n_entries <= n_columns else 2,
        frameon=False,
        fontsize=_SMALL,
        borderaxespad=0.2,
    )
    _ink(legend.get_texts())


def _ink(texts: Sequence[Text]) -> None:
    for text in texts:
        text.set_color(INK)


def _level(axes: Axes, height: float | int, name: str, side: str) -> None:
    """A horizontal line named at its right end, above or below it so that close lines keep readable names."""
    axes.axhline(height, color=VERMILLION, lw=0.9, label=f"_{name}", zorder=1.5)
    axes.annotate(
        name,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        fontsize=_SMALL,
        color=VERMILLION,
        va=side,
        annotation_clip=False,
    )


def _nothing(figure: Figure, axes: Axes, reason: str) -> Figure:
    axes.set_axis_off()
    axes.text(0.5, 0.5, reason, ha="center", va="center", fontsize=_NORMAL, color=MUTED)
    return figure
