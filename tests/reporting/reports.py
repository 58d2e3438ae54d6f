"""Reports and run folders for the tests: of a complete run, of an empty one, and written by hand."""

import json
from dataclasses import asdict
from html.parser import HTMLParser

import torch

from lit_rlkv.evaluation.results import EvalRow, RewardReport
from lit_rlkv.reporting.eviction_record import eviction_record
from lit_rlkv.reporting.logged_samples import LoggedSample
from lit_rlkv.reporting.run_folder import RunFolder
from lit_rlkv.types import NEVER, Record, Rollout


def eval_row(cache, budget, accuracy, n_problems=128):
    return EvalRow(cache, budget, accuracy, n_problems, 10.0, 2048, 0.1, 1e-6)


def make_rollout():
    """Two rows of six columns; the second has one token of padding, and evicts a key."""
    attention_mask = torch.ones(2, 6, dtype=torch.bool)
    attention_mask[1, 0] = False
    response_mask = torch.arange(6).expand(2, 6) >= 3
    evicted_at = torch.full((2, 1, 2, 6), NEVER).int()
    evicted_at[1, 0, 1, 2] = 4
    evicted_at[1, ..., 0] = 0
    input_ids = torch.arange(12).view(2, 6)
    return Rollout(input_ids, attention_mask, response_mask, torch.zeros(2, 6), Record(evicted_at), 2048)


EMPTY = RunFolder("a run")

CONFIG = """\
seed: 3
task:
  _target_: lit_rlkv.tasks.ChainSum
  n_terms: 5
  name: <script>alert(1)</script>
model:
  path: null
  preset:
    _target_: lit_rlkv.models.presets.tiny_qwen3
    hidden_size: 32
    num_hidden_layers: 2
    num_key_value_heads: 4
cache: {policy: random, budget: 16, interval: 4}
algorithm:
  group_size: 8
  advantage: {estimator: grpo}
  loss: {_target_: lit_rlkv.modules.grpo.GRPO}
correction:
  samples_dense: false
  replays: true
  weight_fn: {_target_: lit_rlkv.objectives.corrections.unweighted}
distillation: {weight: 1.0}
"""

ENVIRONMENT = {
    "started_at": "2026-01-31T12:00:00+00:00",
    "command": "/somewhere/bin/python -m lit_rlkv.fit seed=3",
    "git": {"commit": "0123456789abcdef", "is_dirty": True},
    "device": {"type": "cpu", "n_cpus": 8, "n_threads": 4},
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "<b>": "1"},
}

FULL = RunFolder(
    title="a <run> & more",
    config_yaml=CONFIG,
    environments=[ENVIRONMENT],
    history=[
        {"iteration": 1, "reward": 0.25, "rollout_corr/k3_kl": 0.1},
        {"iteration": 2, "reward": 0.75, "rollout_corr/k3_kl": 0.05},
    ],
    before=[eval_row("dense", None, 0.99), eval_row("random 16+4", 16, 0.456)],
    after=[eval_row("dense", None, 0.98), eval_row("random 16+4", 16, 0.81)],
    evictions=eviction_record(make_rollout()),
    stage_seconds={"sft": 90.0, "rl": 5.0},
    samples=[LoggedSample("1 < 2 & 3", "<img src=x onerror=y>", 0.5, 7)],
)

JUDGED = RewardReport(10, 0.9, 1.5, 0.5, 0.05, [0.2, 0.8], [0.1, 0.9], [10, 10])


def write_run(folder, report=FULL):
    """Write the files of a run folder by hand, and return the folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(report.config_yaml)
    (folder / "environment.json").write_text(json.dumps(report.environments))
    columns = list(dict.fromkeys(name for row in report.history for name in row))
    rows = [",".join(str(row.get(name, "")) for name in columns) for row in report.history]
    (folder / "metrics.csv").write_text("\n".join([",".join(columns), *rows]) + "\n")
    results = {
        "before": [asdict(row) for row in report.before],
        "after": [asdict(row) for row in report.after],
        "reward_model": None if report.reward_model is None else asdict(report.reward_model),
        "stage_seconds": report.stage_seconds,
    }
    (folder / "evaluation.json").write_text(json.dumps(results))
    (folder / "evictions.json").write_text(json.dumps(report.evictions))
    (folder / "samples.jsonl").write_text("".join(json.dumps(asdict(s)) + "\n" for s in report.samples))
    return folder


LINKS = {"src", "href", "xlink:href", "srcset", "data", "action"}
VOID = {"meta", "img", "br", "image"}


class Page(HTMLParser):
    """Collects the tags, ids, links and texts of a page, and whether tags are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.classes, self.texts = [], [], [], [], [], []
        self.is_balanced = True
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.classes += (found.get("class") or "").split()
        self.links += [value for name, value in attrs if name in LINKS]

    def handle_endtag(self, tag):
        self.is_balanced &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def count(self, tag):
        return self.tags.count(tag)
