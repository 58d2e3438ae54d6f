"""The model card of an export: how to load it, its scores, its origin."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_rlkv.config import is_local
from lit_rlkv.reporting.tables import markdown_table
from lit_rlkv.runs import environment
from lit_rlkv.runs.open_run import SavedRun
from lit_rlkv.runs.training_run import Results
from lit_rlkv.types import EvalRow

ADAPTER, VALUE_ADAPTER, HEADS = "adapter", "value_adapter", "heads.safetensors"
COLUMNS = {
    "cache": "cache",
    "accuracy": "accuracy",
    "n_problems": "problems",
    "mean_length": "tokens",
    "kv_bytes": "KV bytes",
    "kl": "KL(μ ‖ dense)",
    "replay_gap": "replay gap",
    "learned_reward": "learned reward",
}
"""Columns of the evaluation table and their headings."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote, and the distance of the merged model from the policy."""

    dtype: str
    logit_gap: float
    """max |merged − policy| over the logits of a few tokens."""
    has_adapter: bool
    has_value_adapter: bool
    heads: tuple[str, ...]


def model_card(run: SavedRun, exported: Exported) -> str:
    """Return the page in Markdown, with the header that model hubs read."""
    sections = [
        _header(run),
        _summary(run),
        _loading(run, exported),
        _contents(exported),
        _scores(run),
        _origin(run),
        _config(run),
    ]
    return "\n".join(sections)


def _header(run: SavedRun) -> str:
    fields = ["library_name: transformers", "pipeline_tag: text-generation"]
    path = run.cfg.model.path
    if path is not None and not is_local(path):
        fields.append(f"base_model: {path}")
    fields.append("tags:\n- lit_rlkv\n- reinforcement-learning")
    return "---\n" + "\n".join(fields) + "\n---\n"


def _summary(run: SavedRun) -> str:
    cfg = run.cfg
    task = cfg.task.get("_target_", "").rpartition(".")[2]
    cache = cfg.cache.policy
    if cache != "dense":
        cache += f", {cfg.cache.budget} keys per head and up to {cfg.cache.interval} more"
    return (
        f"# {run.run_dir.resolve().name}\n\n"
        f"The policy of a lit_rlkv run after {run.iteration} iterations "
        f"of RL: {cfg.algorithm.loss._target_.rpartition('.')[2]} on {task}, with rollouts under a KV cache "
        f"({cache}).\n"
    )


def _loading(run: SavedRun, exported: Exported) -> str:
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH")',
    ]
    if exported.has_adapter:
        lines += [
            "",
            "from peft import PeftModel  # or the adapter alone, on the model that training started from",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{run.start}")',
            f'model = PeftModel.from_pretrained(base, "PATH/{ADAPTER}")',
        ]
    code = "\n".join(lines)
    return (
        f"## Load it\n\nPATH is this folder.\n\n```python\n{code}\n```\n\n"
        f"The merged model's logits differ from the policy's by at most {exported.logit_gap:.1e} on a few "
        "tokens.\n"
    )


def _contents(exported: Exported) -> str:
    rows = [f"- the model merged, in {exported.dtype}; tokenizer; generation config"]
    if exported.has_adapter:
        rows.append(f"- `{ADAPTER}/`: the policy's LoRA adapter, in peft's format")
    else:
        rows.append("- no adapter: this layout (`roles`) trains the whole backbone")
    if exported.heads:
        rows.append(
            f"- `{HEADS}`: `ROLE.linear.weight` and `.bias` of {', '.join(exported.heads)}; a score is "
            "weight · h + bias, in float32, of the last hidden state h (of the last token for the reward)"
        )
    else:
        rows.append("- no reward or value head (`heads=true` writes those that the run has)")
    if exported.has_value_adapter:
        rows.append(f"- `{VALUE_ADAPTER}/`: the critic's adapter, which is on while the value head reads")
    return "## What is here\n\n" + "\n".join(rows) + "\n"


def _scores(run: SavedRun) -> str:
    found = Results.load(run.run_dir)
    tables = [
        f"{title}\n\n{_table(rows)}\n"
        for title, rows in (("After training:", found.after), ("Before:", found.before))
        if rows
    ]
    if not tables:
        return "## Scores\n\nThe run was not evaluated.\n"
    n_iterations = run.cfg.algorithm.n_iterations
    if run.iteration != n_iterations and found.after:
        tables.insert(
            0, f"Of the run's end, {n_iterations} iterations; this is the policy after {run.iteration}."
        )
    return "## Scores\n\nOn held-out prompts, by the cache they were answered with.\n\n" + "\n".join(tables)


def _table(rows: Sequence[EvalRow]) -> str:
    """Return a table without empty columns."""
    cells = [asdict(row) for row in rows]
    shown = [column for column in COLUMNS if any(row[column] is not None for row in cells)]
    headings = [COLUMNS[column] for column in shown]
    return markdown_table(headings, [[row[column] for column in shown] for row in cells])


def _origin(run: SavedRun) -> str:
    path = run.run_dir / environment.FILE_NAME
    starts = json.loads(path.read_text()) if path.is_file() else []
    lines = [f"- trained with {_made_with(start)}" for start in starts[-1:]]
    now = {
        "git": environment.git_state(environment.PACKAGE_DIR),
        "packages": environment.installed(environment.PACKAGES),
    }
    return "## Made with\n\n" + "\n".join([*lines, f"- exported with {_made_with(now)}"]) + "\n"


def _made_with(found: Mapping[str, Any]) -> str:
    git = found["git"]
    commit = "no commit known" if git is None else f"commit {git['commit']}"
    if git is not None and git["is_dirty"]:
        commit += " and changes"
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return f"{commit}; {packages}"


def _config(run: SavedRun) -> str:
    """Return the config in a code fence longer than any in it."""
    longest = max(map(len, re.findall("`+", run.config_yaml)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"## Config\n\n{fence}yaml\n{run.config_yaml.rstrip()}\n{fence}\n"


def write_card(run: SavedRun, exported: Exported, folder: Path) -> None:
    """Write the card as README.md, where model hubs look for it."""
    (folder / "README.md").write_text(model_card(run, exported), encoding="utf-8")
