"""verl's `variance_proxy/*`: proxies of the policy gradient's variance from probabilities."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.distributed.ranks import over_ranks
from lit_rlkv.kernels.token_logps import Head, in_chunks, tempered
from lit_rlkv.kernels.token_logps.reference import MAX_CHUNK_LOGITS


@torch.no_grad()
def squared_probs(
    hidden: Float[Tensor, "token dim"], head: Head, temperature: float, vocab_size: int
) -> Float[Tensor, " token"]:
    """Σ_v π_v² = exp(logsumexp(2z) − 2·logsumexp(z)) at each position, z the logits over the temperature.

    The logits of a whole batch never exist at once.
    """

    def chunk_squares(rows: Tensor) -> tuple[Tensor]:
        logits = tempered(head(rows), temperature)
        return (((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp(),)

    size = max(MAX_CHUNK_LOGITS // vocab_size, 1)
    (squares,) = in_chunks(chunk_squares, hidden, size=size, stores_gradients=False)
    return squares


def proxy_sums(
    logps: Float[Tensor, "batch seq"],
    squares: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    weights: Float[Tensor, "batch seq"],
    is_counted: Bool[Tensor, "batch seq"],
) -> Float[Tensor, " sum"]:
    """Return sums over responses: their number, A², W and w̄²·A²·max(W_on, 0); see `variance_proxy`.

    Args:
        squares: Σ_v π_v² at each response token.
        weights: weights of the off-policy correction.
        is_counted: True on tokens that the policy's loss counts; a response without any has A = W = 0.
    """
    energy = 1 - 2 * logps.exp() + squares
    n = is_counted.sum(dim=1).clamp(min=1)

    def total(values: Tensor) -> Tensor:
        return values.masked_fill(~is_counted, 0.0).sum(dim=1)

    advantage, weight = total(advantages) / n, total(weights) / n
    on_policy = total(energy * (weights != 0)).clamp(min=0)
    sums = (
        torch.ones_like(advantage),
        advantage.square(),
        total(energy * weights.square()),
        weight.square() * advantage.square() * on_policy,
    )
    return torch.stack(sums).sum(dim=1)


def variance_proxy(sums: Float[Tensor, " sum"], square: float | None) -> dict[str, float]:
    """verl's proxies of the variance (arXiv:2602.07078), from the sums over the N responses of all processes.

    W = Σ_t w_t²·(1 − 2π_t + Σ_v π_v²) is the squared gradient of a response's log-prob with respect to the
    logits, A its mean advantage. expected_w = E[W], expected_a_squared = E[A²], proxy2_total_power =
    E[w̄²·A²·W_on], where W_on has no weights but leaves out what weighs 0, proxy1_signal_strength = ‖ḡ‖² and
    proxy3_pure_noise = max(proxy2 − proxy1, 0) / (N − 1).

    Power and signal are of different gradients, with respect to the logits and to the parameters: that is
    verl's formula, and good for a trend within one run. `lit_rlkv.diagnostics.covariance` has no such flaw.

    Args:
        square: ‖ḡ‖² of the rollout's policy gradient, for which verl takes the norm of its updates; None
            where not all of it was looked at, which leaves out what depends on it.
    """
    n, a_squared, w, power = over_ranks(sums.double()).tolist()
    found = {
        "variance_proxy/proxy2_total_power": power / n,
        "variance_proxy/expected_a_squared": a_squared / n,
        "variance_proxy/expected_w": w / n,
    }
    if square is not None:
        found["variance_proxy/proxy1_signal_strength"] = square
        found["variance_proxy/proxy3_pure_noise"] = max(power / n - square, 0.0) / max(n - 1, 1)
    return found
