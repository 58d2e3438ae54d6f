"""Targets of a GPU run, in one place: what each stage must reach, read off the rows of its record.

A figure without a target is reported all the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Row = dict[str, Any]
Records = Mapping[str, Sequence[Row]]
"""Rows by the name of their record, of one device and version of the package."""

DECODE_SHARE = 0.80
"""Least share of copy bandwidth, for decode attention that adds up the scores, batch 64."""
DECODE_SLOTS = (2048, 4096, 8192)
SHADOW_TOKENS = 16_384
SHADOW_OVER_FLASH = {1024: 4.0, 2048: 2.4, 4096: 1.4}
"""Time of torch's dense flash attention over shadow attention's, forward and backward, by budget."""
ROLLOUT = {"preset": "1.5b", "batch": 256, "new": 8192, "budget": 1024}
COSTS = (
    ("first call", "first_s", "s"),
    ("whole", "median_s", "s"),
    ("KV cache", "kv_mib", "MiB"),
    ("KV cache, share of all keys", "kv_of_dense", ""),
    ("peak memory", "peak_mib", "MiB"),
)
"""What else a rollout's row has: name, entry and unit."""
ROLLOUT_OVER_GENERATE = 6.0
ROLLOUT_TOKENS_PER_S = 30_000
"""Least rate on an H100."""
GAP_MODEL = "1.5b"
BF16_GAP = {"mean": 2e-2, "p99": 6e-2}
"""|replayed − sampled| in nats, per response token. It grows with the width by rounding alone: with random
weights and 28 layers its mean is 2.4e-3, 4.5e-3 and 8.1e-3 at 256, 512 and 1,024 wide."""
LONG_TOKENS = 32_768
"""Fewest tokens of a sequence of stage E."""
N_OPERATIONS = 8
LEARNING_COSTS = (
    ("rollout", "tokens_per_s", "tokens/s"),
    ("rollout", "rollout_s", "s"),
    ("update", "update_s", "s"),
    ("peak memory", "peak_mib", "MiB"),
)
CELL = ("shape", "bits", "length", "method")
METHOD_COSTS = (
    ("rollout", "tokens_per_s", "tokens/s"),
    ("learner", "learner_s", "s"),
    ("peak memory", "peak_mib", "MiB"),
)
FLOAT32_GAP = 1e-4
"""Largest gap of a token in nats."""


@dataclass(frozen=True)
class Figure:
    """A measured figure and its target."""

    stage: str
    name: str
    value: float | None
    """None if it was not measured."""
    target: float | None = None
    at_most: bool = False
    unit: str = ""

    @property
    def is_good(self) -> bool:
        """True if the target is met, or there is none."""
        return self.target is None or self.verdict == "met"

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `not measured`, or empty without a target."""
        if self.value is None:
            return "not measured"
        if self.target is None:
            return ""
        is_met = self.value <= self.target if self.at_most else self.value >= self.target
        return "met" if is_met else "missed"


def figures(stages: Sequence[str], records: Records) -> list[Figure]:
    """Return the figures of these stages, in order."""
    return [figure for stage in stages for figure in FIGURES[stage](records)]


def correctness(records: Records, stage: str = "A") -> Iterator[Figure]:
    """Yield how many tests passed and failed, by the last outcome of each; T's are among them."""
    outcomes = {row["test"]: row["outcome"] for row in records.get("tests", ())}
    found = list(outcomes.values())
    yield Figure(stage, "tests that passed", found.count("passed") if found else None, 1)
    yield Figure(stage, "tests that failed", found.count("failed") if found else None, 0, at_most=True)


def kernels(records: Records) -> Iterator[Figure]:
    """Yield decode attention against copies, and shadow attention against dense attention."""
    rows = records.get("kernels", ())
    for slots in DECODE_SLOTS:
        row = _latest(rows, op="decode_attention", label=f"batch 64, {slots} slots")
        share = _arm(row, "scores added up", "share_of_ceiling")
        yield Figure("B", f"decode with scores, {slots} slots, share of copy bandwidth", share, DECODE_SHARE)
    found = [row for row in rows if not is_shadow(row)]
    for row in {(row["op"], row["label"]): row for row in found}.values():
        if "arms" not in row:
            yield Figure("B", f"{row['op']}, {row['label']}: {_why_not(row)}", None)
        ours, *others = row.get("arms", [None])
        for arm in others:
            over = arm["seconds"]["median"] / ours["seconds"]["median"]
            yield Figure("B", f"{row['op']}, {row['label']}: time of {arm['name']} over {ours['name']}", over)


def is_shadow(row: Row) -> bool:
    """True for shadow attention at the length of stage K."""
    return row["op"] == "shadow_attention" and row["label"].startswith(f"{SHADOW_TOKENS} tokens")


def shadow(records: Records) -> Iterator[Figure]:
    """Yield shadow attention against dense attention, and every way's milliseconds and rate."""
    rows = [row for row in records.get("kernels", ()) if is_shadow(row)]
    targets = {f"{SHADOW_TOKENS} tokens, budget {n}": target for n, target in SHADOW_OVER_FLASH.items()}
    for label in dict.fromkeys([*targets, *(row["label"] for row in rows)]):
        row, name = _latest(rows, label=label), f"shadow attention, {label}"
        over_flash = _ratio(row, "dense flash", "shadow")
        yield Figure("K", f"{name}, speed over torch's dense flash", over_flash, targets.get(label))
        yield Figure("K", f"{name}, speed over dense cuDNN", _ratio(row, "dense cuDNN", "shadow"))
        with_plan = _ratio(row, "dense flash", "shadow and its plan")
        yield Figure("K", f"{name}, speed over dense flash, plan included", with_plan)
        for arm in (row or {}).get("arms", ()):
            seconds, work = arm["seconds"]["median"], arm.get("work")
            yield Figure("K", f"{name}: {arm['name']}", 1e3 * seconds, unit="ms")
            if work is not None:
                rate = work["n_flops"] / seconds / 1e12
                yield Figure("K", f"{name}: {arm['name']}, rate", rate, unit="TFLOP/s")
        if row is not None and "arms" not in row:
            yield Figure("K", f"{name}: {_why_not(row)}", None)


def rollout(records: Records) -> Iterator[Figure]:
    """Yield the rollout against transformers.generate."""
    rows = records.get("rollout", ())
    ours = _latest(rows, **ROLLOUT, compile_layers=False)
    compiled = _latest(rows, **ROLLOUT, compile_layers=True)
    theirs = _latest(rows, cache="transformers dense", preset=ROLLOUT["preset"], new=ROLLOUT["new"])
    speed = None if ours is None else ours["tokens_per_s"]
    ratio = None if ours is None or theirs is None else ours["tokens_per_s"] / theirs["tokens_per_s"]
    yield Figure(
        "C", "rollout over transformers.generate, 1.5B, 8k tokens, budget 1024", ratio, ROLLOUT_OVER_GENERATE
    )
    units = [
        "tokens/s, extrapolated" if row and row["integrated"] else "tokens/s" for row in (ours, compiled)
    ]
    is_h100 = ours is not None and "H100" in ours["device"]
    yield Figure("C", "rollout", speed, ROLLOUT_TOKENS_PER_S if is_h100 else None, unit=units[0])
    value = compiled and compiled["tokens_per_s"]
    target = ROLLOUT_TOKENS_PER_S if compiled and is_h100 else None
    yield Figure("C", "rollout, compiled layers", value, target, unit=units[1])
    batch = f", batch {theirs['batch']}" if theirs and "batch" in theirs else ""
    yield Figure("C", f"transformers.generate{batch}", theirs and theirs["tokens_per_s"], unit="tokens/s")
    if theirs and "fit_error" in theirs:
        yield Figure(
            "C", "transformers.generate, largest distance of a step from the line", theirs["fit_error"]
        )
    for name, row in (("rollout", ours), ("rollout, compiled layers", compiled)):
        for what, entry, unit in COSTS:
            if row and row.get(entry) is not None:
                yield Figure("C", f"{name}, {what}", row[entry], unit=unit)


def gaps(records: Records) -> Iterator[Figure]:
    """Yield how far the learner's log-probs are from the sampler's."""
    rows = records.get("replay_gap", ())
    models = dict.fromkeys([GAP_MODEL, *(row["model"] for row in rows)])
    for model in models:
        sixteen, full = (_latest(rows, model=model, dtype=dtype) for dtype in ("bfloat16", "float32"))
        for statistic, target in BF16_GAP.items():
            value = sixteen and sixteen["gap"][statistic]
            yield Figure("G", f"gap in bf16, {model}, {statistic}", value, target, at_most=True, unit="nats")
        yield Figure("G", f"gap in bf16, {model}, max", sixteen and sixteen["gap"]["max"], unit="nats")
        ratio = (
            sixteen and "no_eviction" in sixteen and sixteen["gap"]["mean"] / sixteen["no_eviction"]["mean"]
        )
        yield Figure("G", f"gap in bf16, {model}, mean, over that without evictions", ratio or None)
        value = full and full["gap"]["max"]
        yield Figure("G", f"gap in float32, {model}, max", value, FLOAT32_GAP, at_most=True, unit="nats")
        value = full and full["dense_learner"]["mean"]
        yield Figure("G", f"gap of a dense learner in float32, {model}, mean", value, unit="nats")


def learner(records: Records, stage: str = "D") -> Iterator[Figure]:
    """Yield the learner's step under evictions against torch's dense one with the same levers; no target.

    Stage E has the sequences of `LONG_TOKENS` and more.
    """
    rows = [
        row for row in records.get("learner", ()) if (row["asked"]["tokens"] >= LONG_TOKENS) == (stage == "E")
    ]
    if not rows:
        yield Figure(stage, "learner's step", None)
    for row in {str(row["asked"]): row for row in rows}.values():
        name = f"learner's step, {row['asked']['tokens']} tokens"
        for arm in row.get("arms", ()):
            levers, _, view = arm["name"].rpartition(": ")
            if view.startswith("shadow"):
                dense = f"{levers}: torch dense" if levers else "torch dense"
                over = _ratio(row, dense, arm["name"])
                yield Figure(stage, f"{name}, {arm['name']}, speed over torch's dense", over)
            if "peak_bytes" in arm:
                yield Figure(stage, f"{name}, {arm['name']}", 1e3 * arm["seconds"]["median"], unit="ms")
                peak = f"{name}, {arm['name']}, peak memory above the weights"
                yield Figure(stage, peak, arm["peak_bytes"] / 1e9, unit="GB")
        for failed in row.get("failed", ()):
            if failed["out_of_memory"]:
                yield Figure(stage, f"{name}, {failed['name']}: out of memory", None)
        if "arms" not in row:
            yield Figure(stage, f"{name}: {_why_not(row)}", None)


def profile(records: Records) -> Iterator[Figure]:
    """Yield the operations that take most of a step."""
    rows = {row["view"]: row for row in records.get("profile", ())}.values()
    if not rows:
        yield Figure("P", "profile", None)
    for row in rows:
        for found in row["operations"][:N_OPERATIONS]:
            name = f"{row['view']}: {found['name']}, {found['calls']} calls"
            yield Figure("P", name, found["ms"], unit="ms")


def learning(records: Records, stage: str, task: str) -> Iterator[Figure]:
    """Yield the rewards of each arm and what its iterations take."""
    rows = {row["arm"]: row for row in records.get("learns", ()) if row["task"] == task}.values()
    if not rows:
        yield Figure(stage, "reward", None)
    for row in rows:
        n_mean = max(len(row["rewards"]) // 10, 1)
        ends = {"first": row["rewards"][:n_mean], "last": row["rewards"][-n_mean:]}
        for which, rewards in ends.items():
            yield Figure(stage, f"{row['arm']}, reward, {which} iterations", sum(rewards) / len(rewards))
        for what, entry, unit in LEARNING_COSTS:
            yield Figure(stage, f"{row['arm']}, {what}", row[entry], unit=unit)


def methods(records: Records) -> Iterator[Figure]:
    """Yield rollout, learner and memory of each cell."""
    rows = {tuple(row[name] for name in CELL): row for row in records.get("one_gpu", ())}
    if not rows:
        yield Figure("O", "methods", None)
    for cell, row in rows.items():
        name = ", ".join(map(str, cell))
        for what, entry, unit in METHOD_COSTS:
            if row.get(entry) is not None:
                yield Figure("O", f"{name}, {what}", row[entry], unit=unit)


def shared(records: Records) -> Iterator[Figure]:
    """Yield that the table stands in the log; its rows are those of kernels.py."""
    found = [row for row in records.get("kernels", ()) if "shared" in row["op"]]
    yield Figure("H", "cases of shared prompts, table in gpu.log", len(found) or None)


def memory(records: Records) -> Iterator[Figure]:
    """Yield the measured peaks; plan_peaks.py --recorded prints the predicted ones beside them."""
    rows = {(row["case"], row["phase"]): row for row in records.get("plan_peaks", ())}
    if not rows:
        yield Figure("M", "peaks of memory", None)
    for (case, phase), row in rows.items():
        yield Figure("M", f"{case}: {phase}", row["measured"] / 1e6, unit="MB")


def _why_not(row: Row) -> str:
    """Return why a row has no measurements."""
    return "out of memory" if row["out_of_memory"] else f"refused: {row['reason']}"


def _latest(rows: Sequence[Row], **wanted: Any) -> Row | None:
    return next((row for row in reversed(rows) if all(row.get(k) == v for k, v in wanted.items())), None)


def _arm(row: Row | None, name: str, entry: str) -> Any:
    """Return an entry of an arm; None if there is no such row, it was refused, or the arm did not run."""
    return next((arm.get(entry) for arm in (row or {}).get("arms", ()) if arm["name"] == name), None)


def _ratio(row: Row | None, over: str, under: str) -> float | None:
    """Return the median of one arm over that of another."""
    above, below = (_arm(row, name, "seconds") for name in (over, under))
    return None if above is None or below is None else above["median"] / below["median"]


FIGURES: dict[str, Callable[[Records], Iterator[Figure]]] = {
    "T": partial(correctness, stage="T"),
    "G": gaps,
    "R": partial(learning, stage="R", task="from_scratch"),
    "K": shadow,
    "O": methods,
    "A": correctness,
    "D": learner,
    "P": profile,
    "E": partial(learner, stage="E"),
    "H": shared,
    "C": rollout,
    "M": memory,
    "S": partial(learning, stage="S", task="smollm2"),
    "B": kernels,
}
