"""Losses on preference pairs."""

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F


def ranking_loss(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, ""]:
    """−log σ(r_chosen − r_rejected), mean over pairs (Bradley-Terry)."""
    return -F.logsigmoid(chosen - rejected).mean()


def sigmoid(
    preference: Float[Tensor, " pair"], beta: float, label_smoothing: float
) -> Float[Tensor, " pair"]:
    """−(1 − ε)·log σ(βh) − ε·log σ(−βh): DPO (arXiv:2305.18290), for labels of which a share ε is flipped."""
    scaled = beta * preference
    return -(1 - label_smoothing) * F.logsigmoid(scaled) - label_smoothing * F.logsigmoid(-scaled)


def ipo(preference: Float[Tensor, " pair"], beta: float, label_smoothing: float) -> Float[Tensor, " pair"]:
    """(h − 1/(2β))² (arXiv:2310.12036, where β is called τ): h is pulled to a finite target."""
    return (preference - 1 / (2 * beta)).square()


DPO_LOSSES = {"sigmoid": sigmoid, "ipo": ipo}


def check_dpo(*, beta: float, kind: str, label_smoothing: float) -> None:
    """Refuse options that make no loss, before the first rollout.

    Raises:
        ValueError: unknown `kind`, `beta` not above 0, `label_smoothing` outside [0, 0.5) or given to ipo.
    """
    if kind not in DPO_LOSSES:
        raise ValueError(f"kind={kind!r} is no loss on pairs; choose one of {', '.join(DPO_LOSSES)}")
    if not beta > 0:
        raise ValueError(f"beta={beta} ties the policy to no reference; give more than 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} is a share of flipped labels that leaves nothing to learn; "
            "give at least 0 and less than 0.5"
        )
    if kind == "ipo" and label_smoothing > 0:
        raise ValueError(
            f"label_smoothing={label_smoothing} has no meaning in ipo, whose target is finite without it; "
            "give 0, or kind='sigmoid'"
        )


def dpo_loss(
    chosen_margin: Float[Tensor, " pair"],
    rejected_margin: Float[Tensor, " pair"],
    *,
    beta: float,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Float[Tensor, " pair"]:
    """The loss of each pair, a function of h = chosen margin − rejected margin; see `DPO_LOSSES`.

    A margin is Σ_t (log π − log π_ref) over the actions of a response. Whether ipo gets that sum or a mean
    over tokens is the caller's decision. The papers of both losses have the sum, the log-probability of
    the whole response. TRL's DPOTrainer divides it by the number of tokens for ipo, so that the target 1/(2β)
    does not depend on the length; TRL's OnlineDPOTrainer sums for ipo too.

    Raises:
        ValueError: options that `check_dpo` refuses.
    """
    check_dpo(beta=beta, kind=kind, label_smoothing=label_smoothing)
    return DPO_LOSSES[kind](chosen_margin - rejected_margin, beta, label_smoothing)


def best_and_worst(
    scores: Float[Tensor, "prompt group"],
) -> tuple[Int[Tensor, " prompt"], Int[Tensor, " prompt"], Bool[Tensor, " prompt"]]:
    """The first best and the last worst response of each group, and where the two are tied.

    They are two different responses even where all scores are equal; such a pair says nothing.

    Raises:
        ValueError: groups of fewer than two responses.
    """
    n = scores.shape[1]
    if n < 2:
        raise ValueError(f"a group of {n} makes no pair; sample at least 2 responses to a prompt")
    best = scores.argmax(dim=1)
    worst = n - 1 - scores.flip(1).argmin(dim=1)
    return best, worst, scores.amax(dim=1) == scores.amin(dim=1)
