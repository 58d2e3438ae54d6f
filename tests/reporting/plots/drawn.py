"""Helpers of the figure tests: small rollouts and histories, and look-up of drawn elements."""

import torch

from lit_rlkv.types import NEVER
from tests.hand_built import one_row

N = NEVER

TWO_HEADS = one_row([[[0, N, 4, N, N, N], [0, 4, 4, N, N, N]]])

NOTHING = one_row(torch.zeros(1, 1, 3), n_pad=3)


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
