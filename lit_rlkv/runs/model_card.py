"""The model card of an export: how to load it, its scores, its origin."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from jinja2 import StrictUndefined, Template
from omegaconf import OmegaConf

from lit_rlkv.config import is_local
from lit_rlkv.evaluation.results import EvalRow, Results
from lit_rlkv.files import read_if_there
from lit_rlkv.models.kv_scorer import KV_SCORER_FILE
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.reporting.describe import describe
from lit_rlkv.reporting.run_folder import read_environments
from lit_rlkv.reporting.tables import markdown_table
from lit_rlkv.run_files import ENVIRONMENT
from lit_rlkv.runs import environment
from lit_rlkv.runs.open_run import SavedRun

ADAPTER, VALUE_ADAPTER, HEADS = "adapter", "value_adapter", "heads.safetensors"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CARD = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
TEMPLATE = Template(CARD, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
COLUMNS = {
    "cache": "cache",
    "accuracy": "accuracy",
    "reward": "reward",
    "n_problems": "problems",
    "mean_length": "tokens",
    "kv_bytes": "KV bytes",
    "affected": "rows that lost keys",
    "kl": "KL(μ ‖ dense)",
    "replay_gap": "replay gap",
    "learned_reward": "learned reward",
    "perplexity": "perplexity",
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
    """Roles whose head was written."""
    critics: tuple[str, ...] = ()
    """Roles with a head that the run uses."""
    has_scorer: bool = False
    """True if the scorer of an eviction policy was written."""


def model_card(run: SavedRun, exported: Exported) -> str:
    """Return the page in Markdown, with the header that model hubs read."""
    cfg, path = run.cfg, run.run_dir / ENVIRONMENT
    config = cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))
    starts = read_if_there(path, read_environments, [])
    now = {
        "git": environment.git_state(environment.PACKAGE_DIR),
        "packages": environment.installed(environment.PACKAGES),
    }
    longest = max(map(len, re.findall("`+", run.config_yaml)), default=0)
    return TEMPLATE.render(
        run=run,
        exported=exported,
        results=Results.load(run.run_dir),
        base_model=None if cfg.model.path is None or is_local(cfg.model.path) else cfg.model.path,
        # What a stranger can load: a name on the hub, and not the SFT model in this run's folder.
        adapter_base=None if is_local(str(run.start)) else run.start,
        about=describe(config),
        origins=[*(("trained", start) for start in starts[-1:]), ("exported", now)],
        fence="`" * max(3, longest + 1),  # longer than any in the config
        shares_critic=LAYOUTS[cfg.roles.layout].shares_critic,
        table=_table,
        ADAPTER=ADAPTER,
        VALUE_ADAPTER=VALUE_ADAPTER,
        HEADS=HEADS,
        KV_SCORER_FILE=KV_SCORER_FILE,
    )


def _table(rows: Sequence[EvalRow]) -> str:
    """Return a table without empty columns."""
    cells = [asdict(row) for row in rows]
    shown = [column for column in COLUMNS if any(row[column] is not None for row in cells)]
    headings = [COLUMNS[column] for column in shown]
    return markdown_table(headings, [[row[column] for column in shown] for row in cells])
