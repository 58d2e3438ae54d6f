"""How much each action counts in a loss: denominators are settled once, for the whole optimizer step."""

from jaxtyping import Bool, Float
from torch import Tensor


def token_mean(is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int) -> Float[Tensor, "batch seq"]:
    """Every action of the step weighs the same (DAPO, arXiv:2503.14476)."""
    return is_counted.float() / is_counted.sum().clamp(min=1)


def sequence_mean(is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int) -> Float[Tensor, "batch seq"]:
    """Every response of the step weighs the same, its actions share that weight (GRPO, arXiv:2402.03300)."""
    n_sequences = is_counted.any(dim=1).sum().clamp(min=1)
    return is_counted.float() / is_counted.sum(dim=1, keepdim=True).clamp(min=1) / n_sequences


def constant_length(is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int) -> Float[Tensor, "batch seq"]:
    """Sums over responses divided by a constant, the longest length allowed (Dr. GRPO, arXiv:2503.20783)."""
    n_sequences = is_counted.any(dim=1).sum().clamp(min=1)
    return is_counted.float() / max_new_tokens / n_sequences


AGGREGATIONS = {"token": token_mean, "sequence": sequence_mean, "constant": constant_length}
