"""Scalar heads beside the LM head: rewards and values; they live outside peft, as plain modules."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """One number per hidden state; 0 for all before training."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead"]:
        return self.linear(hidden).squeeze(-1)


def last_token(
    hidden: Float[Tensor, "batch seq dim"], is_token: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch dim"]:
    """The hidden state of each sequence's last token, from which a reward is read."""
    column = torch.arange(is_token.shape[1], device=is_token.device)
    last = (column * is_token).amax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]
