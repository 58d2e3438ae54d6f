"""Scalar heads for rewards and values, plain modules beside the LM head."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F


class ScalarHead(nn.Module):
    """Maps each hidden state to one number, in float32 or higher; initialized to 0.

    In bfloat16, rewards near 10 would be 0.06 apart, and similar responses would tie.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead"]:
        """Return w·h + b: a value in the unit of the reward, or a reward in log-odds of preference.

        The result is float32, or the dtype of `hidden` if it is wider, also under autocast.
        """
        # Fabric may have converted the weights to the run's precision, and autocast may be on.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = self.linear.weight.to(dtype), self.linear.bias.to(dtype)
            return F.linear(hidden.to(dtype), weight, bias).squeeze(-1)


def last_token(
    hidden: Float[Tensor, "batch seq dim"], attention_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch dim"]:
    """Return the hidden state of each sequence's last token."""
    column = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = (column * attention_mask).amax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]
