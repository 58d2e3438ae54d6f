"""Helpers of the figure tests: small rollouts and histories, and look-up of drawn elements."""

import torch

from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.types import NEVER, Rollout


def make_rollout(evicted_at, n_pad=1, n_prompt=2):
    """One row of `n_pad` padding and `n_prompt` prompt columns; the rest are actions."""
    evicted_at = torch.as_tensor(evicted_at, dtype=torch.int32)[None]
    seq = evicted_at.shape[-1]
    attention_mask = torch.arange(seq)[None] >= n_pad
    response_mask = torch.arange(seq)[None] >= n_pad + n_prompt
    evicted_at = evicted_at.masked_fill(~attention_mask[:, None, None], 0)
    return Rollout(
        torch.zeros(1, seq, dtype=torch.long),
        attention_mask,
        response_mask,
        torch.zeros(1, seq),
        evicted_at,
        0,
    )


N = NEVER


TWO_HEADS = make_rollout([[[0, N, 4, N, N, N], [0, 4, 4, N, N, N]]])


def eval_row(cache, budget, accuracy):
    return EvalRow(cache, budget, accuracy, 100, 10.0, 1024, 0.1, 1e-6)


def line(figure, label):
    return next(found for found in figure.axes[0].lines if found.get_label() == label)


def labels(figure):
    return [found.get_label() for found in figure.axes[0].lines if not found.get_label().startswith("_")]


POSITIONS = {
    "iteration": 7,
    "name": "mismatch",
    "position": [0, 1, 2, 3],
    "n_response_tokens": [100, 100, 40, 2],
    "k1": [0.0, -0.1, 0.3, 1.0],
    "k3": [0.0, 0.01, 0.2, 1.5],
    "abs_log_ratio_p95": [0.0, 0.2, 1.0, 3.0],
    "abs_log_ratio_p99": [2e-7, 0.5, 8.0, 30.0],
    "prefix_abs_log_ratio": [0.0, 0.1, 0.5, 0.9],
    "prefix_abs_log_ratio_p95": [0.0, 0.3, 2.0, 4.0],
    "prefix_ess": [1.0, 0.9, 0.05, 0.002],
    "overlap_mean": [1.0, 0.9, 0.8, None],
    "overlap_p05": [1.0, 0.4, 0.05, None],
}


def layers(iteration, *kls):
    return {"iteration": iteration, "name": "layers", "layer_kl": list(kls), "all_layers_kl": 0.5}
