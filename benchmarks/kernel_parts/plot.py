"""The pictures: time against budget, against length and against slots; memory against positions."""

from collections.abc import Callable, Sequence
from itertools import cycle

from kernel_parts.case import ArmResult, CaseResult, Setting
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from lit_rlkv.reporting.plots.style import (
    BLUE,
    FULL_WIDTH,
    GREEN,
    HALF_WIDTH,
    INK,
    MUTED,
    NORMAL,
    PURPLE,
    SMALL,
    VERMILLION,
    style_axes,
)

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, "#e69f00", "#56b4e9")  # of Okabe and Ito
HEIGHT = 3.4
"""Inches of a panel."""
DENSE = {"dense flash": INK, "dense SDPA": INK, "dense cuDNN": MUTED, "torch dense": INK}

Point = tuple[float, float]
Lines = dict[str, list[Point]]


def draw(results: Sequence[CaseResult], setting: Setting) -> Figure:
    """A panel for each question that the results can answer."""
    of_op: dict[str, list[CaseResult]] = {}
    for result in results:
        of_op.setdefault(result.op, []).append(result)
    panels: list[Callable[[Axes], None]] = []
    if "shadow_attention" in of_op:
        shadow = of_op["shadow_attention"]
        panels += [lambda axes: _against_budget(axes, shadow), lambda axes: _against_length(axes, shadow)]
    if "decode_attention" in of_op:
        panels.append(lambda axes: _against_slots(axes, of_op["decode_attention"]))
    if "token_logps" in of_op:
        panels.append(lambda axes: _against_positions(axes, of_op["token_logps"]))
    n_columns = min(2, max(1, len(panels)))
    n_rows = max(1, -(-len(panels) // n_columns))
    figure = Figure(figsize=(HALF_WIDTH * n_columns, HEIGHT * n_rows), dpi=100, layout="constrained")
    for number, panel in enumerate(panels):
        panel(figure.add_subplot(n_rows, n_columns, number + 1))
    if setting.timed_kernels != "triton":
        figure.suptitle("no GPU: toy sizes, timed is the plain definition", fontsize=NORMAL, color=MUTED)
    return figure


def draw_learner(results: Sequence[CaseResult], setting: Setting) -> Figure:
    """Seconds of a learner's step against budget, at the longest length, and against length."""
    figure = Figure(figsize=(FULL_WIDTH, HEIGHT), dpi=100, layout="constrained")
    longest = max(results, key=lambda result: int(result.sizes["seq"]))
    by_budget: Lines = {}
    budgets = [float(arm.name.split(",")[0].split()[1]) for arm in longest.arms if arm.name[:6] == "shadow"]
    for arm in longest.arms:
        view, _, kernels = arm.name.partition(", ")
        if view.startswith("shadow"):
            point = (float(view.split()[1]), arm.seconds.median)
            by_budget.setdefault(f"shadow, {kernels}", []).append(point)
        else:
            by_budget[arm.name] = [(budget, arm.seconds.median) for budget in sorted(set(budgets))]
    by_length: Lines = {}
    for result in results:
        for arm in result.arms:
            if setting.timed_kernels == "triton" and arm.name.endswith("reference"):
                continue  # so many lines would hide the ones in question
            by_length.setdefault(arm.name, []).append((float(result.sizes["seq"]), arm.seconds.median))
    title = f"a learner's step, {longest.label}"
    axes = figure.add_subplot(1, 2, 1)
    draw_panel(axes, by_budget, title, "budget (keys)", "seconds", starts_at_zero=True)
    axes = figure.add_subplot(1, 2, 2)
    draw_panel(axes, by_length, "a learner's step", "length (tokens)", "seconds", is_log=True)
    if setting.timed_kernels != "triton":
        figure.suptitle("no GPU: toy sizes, timed is the plain definition", fontsize=NORMAL, color=MUTED)
    return figure


def _against_budget(axes: Axes, results: Sequence[CaseResult]) -> None:
    """At the length with most budgets; dense lines are flat, because nothing is evicted there."""
    lengths = [int(result.sizes["seq"]) for result in results]
    seq = max(lengths, key=lambda length: (lengths.count(length), length == 16_384))
    lines: Lines = {}
    for result in results:
        if result.sizes["seq"] == seq:
            for arm in result.arms:
                if arm.name in ("shadow", "FlexAttention", *DENSE):
                    lines.setdefault(arm.name, []).append((float(result.sizes["budget"]), _ms(arm)))
    title = f"shadow attention, forward + backward, {seq} tokens"
    draw_panel(axes, lines, title, "budget (keys)", "ms", starts_at_zero=True)


def _against_length(axes: Axes, results: Sequence[CaseResult]) -> None:
    lines: Lines = {}
    for result in results:
        for arm in result.arms:
            if arm.name == "shadow":
                name = f"shadow, budget {result.sizes['budget']}"
            elif arm.name in DENSE:
                name = arm.name
            else:
                continue
            lines.setdefault(name, []).append((float(result.sizes["seq"]), _ms(arm)))
    for name in lines.keys() & DENSE.keys():  # measured beside every budget
        lines[name] = [(x, min(y for at, y in lines[name] if at == x)) for x in {x for x, _ in lines[name]}]
    lines = dict(sorted(lines.items(), key=lambda line: (line[0] in DENSE, min(y for _, y in line[1]))))
    draw_panel(axes, lines, "shadow attention, forward + backward", "length (tokens)", "ms", is_log=True)


def _against_slots(axes: Axes, results: Sequence[CaseResult]) -> None:
    batch = max(int(result.sizes["batch"]) for result in results)
    lines: Lines = {}
    for result in results:
        if result.sizes["batch"] == batch:
            for arm in result.arms:
                share = 100 * (arm.share_of_ceiling or 0.0)
                lines.setdefault(arm.name, []).append((float(result.sizes["slots"]), share))
    title = f"decode attention, batch {batch}"
    draw_panel(axes, lines, title, "slots", "% of copy bandwidth", starts_at_zero=True)


def _against_positions(axes: Axes, results: Sequence[CaseResult]) -> None:
    lines: Lines = {}
    for result in results:
        if result.sizes["what"] == "log-probs":
            for arm in result.arms:
                lines.setdefault(arm.name, []).append(
                    (float(result.sizes["positions"]), arm.peak_bytes / 1e6)
                )
    title = "log-probs of tokens, forward + backward"
    draw_panel(axes, lines, title, "positions", "peak MB above the inputs", is_log=True)


def _ms(arm: ArmResult) -> float:
    return 1e3 * arm.seconds.median


def draw_panel(
    axes: Axes,
    lines: Lines,
    title: str,
    xlabel: str,
    ylabel: str,
    *,
    is_log: bool = False,
    starts_at_zero: bool = False,
) -> None:
    """Dense lines are dashed."""
    colors = cycle(COLORS)
    for name, points in lines.items():
        x, y = zip(*sorted(points), strict=True)
        color = DENSE[name] if name in DENSE else next(colors)
        dashes = (0, (5, 3)) if name in DENSE else "-"
        axes.plot(x, y, color=color, ls=dashes, lw=1.5, marker="o", ms=3.5, label=name)
    axes.set_title(title, fontsize=NORMAL, color=INK, loc="left")
    axes.set_xlabel(xlabel, fontsize=SMALL, color=INK)
    axes.set_ylabel(ylabel, fontsize=SMALL, color=INK)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{int(tick):,}" for tick in ticks])
    if is_log:
        _log_y(axes, [y for points in lines.values() for _, y in points])
    if starts_at_zero:
        axes.set_ylim(bottom=0)
    style_axes(axes)
    axes.tick_params(labelsize=SMALL, labelcolor=MUTED, length=0, which="both")
    axes.legend(frameon=False, fontsize=SMALL)


def _log_y(axes: Axes, values: Sequence[float]) -> None:
    """Plain numbers as labels: between powers of ten too where there are few of these."""
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain if max(values) < 12 * min(values) else NullFormatter())
