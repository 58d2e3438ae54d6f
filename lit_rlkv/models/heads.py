"""Scalar heads beside the LM head: rewards and values; they live outside peft, as plain modules."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F


class ScalarHead(nn.Module):
    """One number per hidden state, in float32 or better; 0 for all before training.

    In bfloat16 rewards near 10 would be 0.06 apart, and close responses would tie.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead"]:
        """w·h + b of each hidden state: a value in the reward's unit, or a reward in log-odds of preference.

        Returns:
            float32, or the dtype of `hidden` where that is wider, whatever autocast is on.
        """
        # Whatever the run's precision has made of the weights: Fabric converts and autocasts all it can.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = self.linear.weight.to(dtype), self.linear.bias.to(dtype)
            return F.linear(hidden.to(dtype), weight, bias).squeeze(-1)


def last_token(
    hidden: Float[Tensor, "batch seq dim"], attention_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch dim"]:
    """The hidden state of each sequence's last token, from which a reward is read."""
    column = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = (column * attention_mask).amax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]
