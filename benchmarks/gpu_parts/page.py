"""The page of a GPU run: for each stage what was measured, its target, and whether it was met."""

import record
from gpu_parts.stages import TITLES
from gpu_parts.targets import Figure, Records, Row, figures

NAMES = (
    *("stages", "tests", "kernels", "rollout", "replay_gap", "learner", "profile", "learns", "one_gpu"),
    "plan_peaks",
)


def read_records(here: Row | None = None) -> Records:
    """Return the rows of one device and version of the package, by default of this machine's.

    Args:
        here: a row of that device and version
    """
    here = here or record.provenance()
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


def written(records: Records, here: Row, *, is_toy: bool) -> str:
    """Return the page, in Markdown.

    Args:
        here: machine and versions of the rows
    """
    title = "Toy run: the figures mean nothing" if is_toy else "GPU run"
    versions = ", ".join(
        f"{name} {here[name]}" for name in ("torch", "triton", "transformers") if name in here
    )
    lines = [f"# {title}", "", f"{here['device']}; {versions}; {here['date']}, commit {here['commit']}", ""]
    ended = {row["stage"] for row in records.get("stages", ())}
    ran = [
        stage
        for stage in TITLES
        if stage in ended or any(figure.value is not None for figure in figures([stage], records))
    ]
    return "\n".join([*lines, *(section(stage, records, is_toy=is_toy) for stage in ran)])


def section(stage: str, records: Records, *, is_toy: bool) -> str:
    """Return the part of one stage."""
    ended = next((row for row in reversed(records.get("stages", ())) if row["stage"] == stage), None)
    lines = [f"## {stage}: {TITLES[stage]}", ""]
    if ended is not None:
        lines += [f"{ended['outcome']} after {ended['seconds']:.0f} s", ""]
    lines += ["| figure | measured | target | |", "|---|---|---|---|"]
    lines += [_line(figure, is_toy=is_toy) for figure in figures([stage], records)]
    if ended is not None and ended["outcome"] == "crashed":
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
