"""Share of an SFT model's tokens that eviction can affect, by task and budget."""

import json
from collections.abc import Sequence
from pathlib import Path

import record
from omegaconf import OmegaConf
from study_parts import runs
from study_parts.plan import BUDGETS, Setting, budgets

from lit_rlkv.data.tokenizers import encode_prompts, load_tokenizer
from lit_rlkv.reporting.tables import markdown_table
from lit_rlkv.run_files import BACKBONE

NAME = "study_exposure"
SEED = 2
"""One is enough to see by how much tasks and budgets differ."""
METRICS = {
    "affected": "kv/affected",
    "mean_length": "completions/mean_length",
    "max_length": "completions/max_length",
    "kv_bytes": "kv/bytes",
}


def places() -> list[Setting]:
    """Every task and budget of the plan."""
    found = [*BUDGETS.items(), *((run.task, run.budget) for run in budgets(lambda *_: 0.0))]
    return [
        Setting("naive", False, SEED, lr=runs.STANDS_STILL, task=task, budget=budget, n_iterations=1)
        for task, budget in dict.fromkeys(found)
    ]


def overrides(place: Setting) -> list[str]:
    """One rollout of the SFT model, of which nothing is learned."""
    look = "+diagnostics.cache={_target_:lit_rlkv.callbacks.cache_statistics.CacheStatistics}"
    return [*place.overrides, "stages=[sft,rl]", "callbacks.samples_every=1", look]


def missing() -> list[Setting]:
    done = runs.finished(NAME)
    return [place for place in places() if runs.key(overrides(place)) not in done]


def run(place: Setting, runs_dir: Path) -> dict:
    """Keys are of one layer and head: those there is room for, and those of the longest sequence."""
    told = overrides(place)
    folder = runs.fit(f"exposure-{place.task}-{place.budget}", told, runs_dir)
    (history,) = runs.read_metrics(folder)
    found = {name: float(history[metric]) for name, metric in METRICS.items()}
    cfg = OmegaConf.load(folder / "config.yaml")
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(str(folder / BACKBONE) if cfg.model.path else None)
    n_prompt = encode_prompts(tokenizer, [sample["prompt"] for sample in samples]).input_ids.shape[1]
    row = {
        **{"task": place.task, "policy": place.policy, "budget": place.budget, "seed": place.seed},
        "overrides": told,
        "n_slots": cfg.cache.budget + cfg.cache.interval,
        "n_needed": n_prompt + int(found["max_length"]) - 1,  # the last token is written and never read
        "n_full": n_prompt + cfg.rollout.max_new_tokens,
        **found,
    }
    record.append(NAME, row)
    return row


def table(rows: Sequence[dict]) -> str:
    """One line for each place."""
    headings = ["task", "budget", "actions a response", "after an eviction", "of all, %"]
    headings += ["keys: room", "that the longest response reads", "room of a full cache"]
    body = [
        [
            row["task"],
            str(row["budget"]),
            f"{row['mean_length']:.1f}",
            f"{row['affected'] * row['mean_length']:.1f}",
            f"{100 * row['affected']:.0f}",
            *(f"{row[name]}" for name in ("n_slots", "n_needed", "n_full")),
        ]
        for row in rows
    ]
    return markdown_table(headings, body)
