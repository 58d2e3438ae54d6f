"""The page of a GPU run: for each stage what was measured, its target, and whether it was met."""

import record
from gpu_parts.stages import TITLES
from gpu_parts.targets import Figure, Records, figures

NAMES = ("stages", "tests", "kernels", "rollout", "replay_gap", "learner", "tune")


def read_records() -> Records:
    """Return the rows of this device and this version of the package."""
    here = record.provenance()
    return {
        name: [
            row
            for row in record.rows(name)
            # Tests run with one thread, benchmarks with more.
            if row["source"] == here["source"]
            and row["device"].rpartition(", ")[0] == here["device"].rpartition(", ")[0]
        ]
        for name in NAMES
    }


def written(records: Records, *, is_toy: bool) -> str:
    """Return the page, in Markdown."""
    here = record.provenance()
    title = "Toy run: the figures mean nothing" if is_toy else "GPU run"
    versions = ", ".join(
        f"{name} {here[name]}" for name in ("torch", "triton", "transformers") if name in here
    )
    lines = [f"# {title}", "", f"{here['device']}; {versions}; {here['date']}, commit {here['commit']}", ""]
    ran = {row["stage"] for row in records["stages"]}
    return "\n".join([*lines, *(section(stage, records, is_toy=is_toy) for stage in TITLES if stage in ran)])


def section(stage: str, records: Records, *, is_toy: bool) -> str:
    """Return the part of one stage."""
    ended = next(row for row in reversed(records["stages"]) if row["stage"] == stage)
    lines = [f"## {stage}: {TITLES[stage]}", "", f"{ended['outcome']} after {ended['seconds']:.0f} s", ""]
    lines += ["| figure | measured | target | |", "|---|---|---|---|"]
    lines += [_line(figure, is_toy=is_toy) for figure in figures([stage], records)]
    if ended["outcome"] == "crashed":
        lines += ["", "```text", *ended["last_lines"], "```"]
    return "\n".join([*lines, ""])


def _line(figure: Figure, *, is_toy: bool) -> str:
    target, verdict = "", figure.verdict
    if figure.target is not None:
        target = f"{'at most' if figure.at_most else 'at least'} {_number(figure.target)}"
    if is_toy and verdict in ("met", "missed"):
        verdict = "toy"
    measured = "" if figure.value is None else f"{_number(figure.value)} {figure.unit}".rstrip()
    return f"| {figure.name} | {measured} | {target} | {verdict} |"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
