"""Losses of distillation: a divergence between teacher and student over the full vocabulary."""

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kernels.token_logps import Head, TokenSets, policy_kl


def distillation_loss(
    teacher: Float[Tensor, "action teacher_dim"],
    student: Float[Tensor, "action dim"],
    teacher_head: Head,
    student_head: Head,
    temperature: float,
    vocab_size: int,
    n_response_tokens: int,
    *,
    beta: float | int,
    heads_are_frozen: bool = False,
    sets: TokenSets | None = None,
) -> Float[Tensor, ""]:
    """Return Σ divergence / n_response_tokens in nats, with a stop-gradient on the teacher.

    At a token it is KL(teacher ‖ student) = Σ_v p_teacher (log p_teacher − log p_student) for beta = 0,
    KL(student ‖ teacher) for beta = 1, and between them GKD's JSD (arXiv:2306.13649), which is
    β·KL(teacher ‖ m) + (1 − β)·KL(student ‖ m) with m = β·teacher + (1 − β)·student. As in TRL it jumps at
    both ends: the KLs are limits of JSD / β and JSD / (1 − β). Logits of a whole batch never exist at once.

    Args:
        teacher: the teacher's last hidden states at the response tokens, of its own size.
        student: the student's last hidden states at the same tokens; gradients flow into these.
        teacher_head: maps hidden states to logits; its gradient is stopped.
        student_head: the same for the student.
        temperature: divides the logits of both.
        n_response_tokens: the denominator, counted over the whole optimizer step and all ranks.
        beta: from 0 to 1, as in TRL.
        heads_are_frozen: True if no parameter of either head needs a gradient.
        sets: renormalise teacher and student over the same set at each token; see `token_logps`.

    Raises:
        ValueError: `heads_are_frozen` is True, and a parameter of the student's head requires a gradient.
    """

    def stopped_head(hidden: Tensor) -> Tensor:
        return teacher_head(hidden).detach()

    sides = ((teacher.detach(), stopped_head), (student, student_head))
    (hidden_p, head_p), (hidden_q, head_q) = reversed(sides) if beta == 1 else sides
    token_loss = policy_kl(
        hidden_p,
        hidden_q,
        head_p,
        head_q,
        temperature,
        vocab_size,
        beta=beta % 1,
        heads_are_frozen=heads_are_frozen,
        sets=sets,
    )
    return token_loss.sum() / n_response_tokens
