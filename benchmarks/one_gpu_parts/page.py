"""The page of one_gpu.py: a table for each shape, and the published figures beside ours."""

from collections.abc import Sequence
from typing import Any

from record import ROOT

Row = dict[str, Any]
NAME = "one_gpu"
PAGE = ROOT / "docs" / "results" / "one_gpu.md"
METHODS = ("dense", "naive", "tis", "sparse_rl", "shadow", "smd")
"""Experiments of conf/experiment."""
SHAPES = {"0.5b": "0.5B (Qwen2.5-0.5B)", "1.5b": "1.5B (Qwen2.5-1.5B)", "4b": "4B (Qwen3-4B)"}
RESPONSES = {2048: 128, 8192: 64, 32_768: 16}
"""Rows of a rollout by their tokens: about as many tokens at each length."""
LENGTHS = (*RESPONSES,)
NOT_RUN = "not run"
TEXT = """# Methods on one GPU

What the owner of one GPU compares: a GRPO step of every method, with LoRA adapters on a frozen base.
{state}

```bash
python benchmarks/one_gpu.py --record   # measures for 8 minutes; started again, it measures what is missing
python benchmarks/one_gpu.py --page     # writes this page
python benchmarks/one_gpu.py --record model.path=Qwen/Qwen3-4B --shapes 4b
```

A cell is **tokens/s of the rollout · seconds of the learner (scoring and update) · peak memory in GiB**.
A rollout has 128 responses of 2,048 tokens, 64 of 8,192 or 16 of 32,768. `dense` keeps all keys; the others
evict by `h2o` down to 1,024 keys, with room for 128 more. Random weights unless a model is named. `*`: the
first step, compilation included. `~`: the time ended within the rollout, which is extrapolated.

{tables}
## Beside published figures

Other machines, models and lengths: no figure compares with ours but by its kind.

| source | setting | rollout | step |
|---|---|---|---|
| Sparrow [1] | Qwen3-1.7B, 4 × H200 | 2,561 → 5,662 tokens/s, 2.21 × | 1.97 × |
{ratios}
| transformers' continuous batching [2] | Qwen3-4B, B200 | 506 tokens/s | |
| vLLM [2] | Qwen3-4B, B200 | 7,224 tokens/s | |
{speeds}

[1] [arXiv:2606.08446](https://arxiv.org/abs/2606.08446), table 2. [2] [unsloth #5108](https://github.com/unslothai/unsloth/issues/5108).
"""


def cell_name(row: Row) -> str:
    """Return what tells a cell from the others."""
    name = f"{row['shape']}, {row['bits']} bit, {row['length']} tokens, {row['method']}"
    return ", ".join([name, *row["overrides"]])


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the last row of each cell, of the device and the version of the package of the last row."""
    here = [row for row in rows if all(row[k] == rows[-1][k] for k in ("device", "source"))]
    return list({cell_name(row): row for row in here}.values())


def written(rows: Sequence[Row]) -> str:
    """Return the page of a record, in Markdown."""
    found = latest(rows)
    tables = "\n".join(table(found, shape) for shape in SHAPES)
    state = "**No GPU has run it yet.**"
    if found:
        last = found[-1]
        versions = ", ".join(f"{name} {last[name]}" for name in ("torch", "triton", "transformers"))
        state = f"{last['device']}; {versions}; {last['date']}, commit {last['commit']}."
    ratios = "\n".join(ratio_line(found, length) for length in LENGTHS)
    shortest = {method: cell(find(found, "4b", 16, LENGTHS[0], method)) for method in ("dense", "shadow")}
    speeds = "\n".join(f"| this project, `{m}` | 4B shape | {shown} | |" for m, shown in shortest.items())
    return TEXT.format(state=state, tables=tables, ratios=ratios, speeds=speeds)


def table(rows: Sequence[Row], shape: str) -> str:
    """Return the table of one shape: a line for each base and method, a column for each length."""
    lengths = LENGTHS if shape in SHAPES else sorted({row["length"] for row in rows})
    models = dict.fromkeys([(), *(tuple(row["overrides"]) for row in rows if row["shape"] == shape)])
    lines = [f"## {SHAPES.get(shape, shape)}", ""]
    lines += ["| base | method | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |"]
    lines += ["|---|---|" + "---|" * len(lengths)]
    for overrides in models:
        for bits in (16, 4):
            for method in METHODS:
                base = ", ".join([f"{bits} bit", *(f"`{text}`" for text in overrides)])
                cells = [cell(find(rows, shape, bits, n, method, overrides)) for n in lengths]
                lines.append(f"| {base} | `{method}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def find(
    rows: Sequence[Row], shape: str, bits: int, length: int, method: str, overrides: Sequence[str] = ()
) -> Row | None:
    name = cell_name(
        {"shape": shape, "bits": bits, "length": length, "method": method, "overrides": overrides}
    )
    return next((row for row in rows if cell_name(row) == name), None)


def cell(row: Row | None) -> str:
    """Return the figures of a cell, or why there are none."""
    if row is None:
        return NOT_RUN
    if "reason" in row:
        return "out of memory" if row["out_of_memory"] else f"cannot run: {row['reason']}"
    mark = "~" if row["integrated"] else "*" if row["n_iterations"] < 2 else ""
    learner = f"{row['learner_s']:.3g} s" if "learner_s" in row else "–"
    peak = "–" if row["peak_mib"] is None else f"{row['peak_mib'] / 1024:.1f}"
    return f"{mark}{row['tokens_per_s']:,.0f} · {learner} · {peak}"


def ratio_line(rows: Sequence[Row], length: int) -> str:
    """Return the line of rollout and step under a budget over those with all keys, at 1.5B and 16 bit."""
    dense, ours = (find(rows, "1.5b", 16, length, method) for method in ("dense", "shadow"))
    rollout = step = NOT_RUN
    if dense is not None and ours is not None and "tokens_per_s" in dense and "tokens_per_s" in ours:
        low, high = dense["tokens_per_s"], ours["tokens_per_s"]
        rollout = f"{low:,.0f} → {high:,.0f} tokens/s, {high / low:.2f} ×"
        if "learner_s" in dense and "learner_s" in ours:
            ratio = (dense["rollout_s"] + dense["learner_s"]) / (ours["rollout_s"] + ours["learner_s"])
            step = f"{ratio:.2f} ×"
    return f"| this project, `shadow` beside `dense` | 1.5B shape, {length:,} tokens | {rollout} | {step} |"
