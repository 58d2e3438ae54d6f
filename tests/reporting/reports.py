"""Reports for the tests: of a complete run and of an empty one."""

import torch

from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.reporting.logged_samples import LoggedSample
from lit_rlkv.reporting.report import RunReport
from lit_rlkv.types import NEVER, Rollout


def eval_row(cache, budget, accuracy):
    return EvalRow(cache, budget, accuracy, 128, 10.0, 2048, 0.1, 1e-6)


def make_rollout():
    """Two rows of six columns; the second has one token of padding, and evicts a key."""
    attention_mask = torch.ones(2, 6, dtype=torch.bool)
    attention_mask[1, 0] = False
    response_mask = torch.arange(6).expand(2, 6) >= 3
    evicted_at = torch.full((2, 1, 2, 6), NEVER).int()
    evicted_at[1, 0, 1, 2] = 4
    evicted_at[1, ..., 0] = 0
    input_ids = torch.arange(12).view(2, 6)
    return Rollout(input_ids, attention_mask, response_mask, torch.zeros(2, 6), evicted_at, 2048)


EMPTY = RunReport("a run", "", [], [], [], None, None, None, {}, [], {})


FULL = RunReport(
    title="a <run> & more",
    config_yaml="task:\n  name: <script>alert(1)</script>\n",
    history=[
        {"iteration": 1, "reward": 0.25, "rollout_corr/kl": 0.1},
        {"iteration": 2, "reward": 0.75, "rollout_corr/kl": 0.05},
    ],
    before=[eval_row("dense", None, 0.99), eval_row("random 16+4", 16, 0.456)],
    after=[eval_row("dense", None, 0.98), eval_row("random 16+4", 16, 0.81)],
    rollout=make_rollout(),
    budget=16,
    interval=4,
    stage_seconds={"sft": 90.0, "rl": 5.0},
    samples=[LoggedSample("1 < 2 & 3", "<img src=x onerror=y>", 0.5, 7)],
    versions={"torch": "2.13.0", "<b>": "1"},
)
