"""Losses on preference pairs."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def ranking_loss(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, ""]:
    """−log σ(r_chosen − r_rejected), mean over pairs (Bradley-Terry)."""
    return -F.logsigmoid(chosen - rejected).mean()
