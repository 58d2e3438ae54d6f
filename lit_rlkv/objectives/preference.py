"""Losses on preference pairs."""

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.checks import Range


def ranking_loss(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, ""]:
    """Return the sum over pairs of −log σ(r_chosen − r_rejected) (Bradley-Terry)."""
    return -F.logsigmoid(chosen - rejected).sum()


def sigmoid(
    preference: Float[Tensor, " pair"], beta: float, label_smoothing: float
) -> Float[Tensor, " pair"]:
    """Return −(1 − ε)·log σ(βh) − ε·log σ(−βh): DPO (arXiv:2305.18290) with label smoothing ε."""
    scaled = beta * preference
    return -(1 - label_smoothing) * F.logsigmoid(scaled) - label_smoothing * F.logsigmoid(-scaled)


def ipo(preference: Float[Tensor, " pair"], beta: float, label_smoothing: float) -> Float[Tensor, " pair"]:
    """Return (h − 1/(2β))²: IPO (arXiv:2310.12036, where β is called τ)."""
    return (preference - 1 / (2 * beta)).square()


DPO_LOSSES = {"sigmoid": sigmoid, "ipo": ipo}


def check_dpo(*, beta: float, kind: str, label_smoothing: float) -> None:
    """Check the options of `dpo_loss`.

    Raises:
        ValueError: unknown `kind`, `beta` not above 0, `label_smoothing` outside [0, 0.5) or given to ipo.
    """
    if kind not in DPO_LOSSES:
        raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(DPO_LOSSES)}")
    Range(above=0).check("beta", beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must be at least 0 and below 0.5, got {label_smoothing}; change it"
        )
    if kind == "ipo" and label_smoothing > 0:
        raise ValueError(
            f"label_smoothing must be 0 for kind='ipo', got {label_smoothing}; give 0, or kind='sigmoid'"
        )


def dpo_loss(
    chosen_margin: Float[Tensor, " pair"],
    rejected_margin: Float[Tensor, " pair"],
    *,
    beta: float,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Float[Tensor, " pair"]:
    """Return the loss of each pair, a function of h = chosen margin − rejected margin; see `DPO_LOSSES`.

    A margin is Σ_t (log π − log π_ref) over the tokens of a response, as in the papers of both losses. For
    ipo the caller may pass means over tokens instead. TRL's DPOTrainer does so, which makes the target 1/(2β)
    independent of the length; TRL's OnlineDPOTrainer sums.

    Raises:
        ValueError: options that `check_dpo` refuses.
    """
    check_dpo(beta=beta, kind=kind, label_smoothing=label_smoothing)
    return DPO_LOSSES[kind](chosen_margin - rejected_margin, beta, label_smoothing)


def best_and_worst(
    scores: Float[Tensor, "prompt group"],
) -> tuple[Int[Tensor, " prompt"], Int[Tensor, " prompt"], Bool[Tensor, " prompt"]]:
    """Return the first best and the last worst response of each group, and a mask of ties.

    The two responses always differ. A pair with equal scores (a tie) carries no preference.

    Raises:
        ValueError: groups of fewer than two responses.
    """
    n = scores.shape[1]
    if n < 2:
        raise ValueError(f"a group must have at least 2 responses, got {n}; sample more per prompt")
    best = scores.argmax(dim=1)
    worst = n - 1 - scores.flip(1).argmin(dim=1)
    return best, worst, scores.amax(dim=1) == scores.amin(dim=1)
