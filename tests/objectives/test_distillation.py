import pytest
import torch

from lit_rlkv.kernels.token_logps import TokenSets
from lit_rlkv.objectives.distillation import distillation_loss

VOCAB, DIM, N = 7, 4, 5


def make_inputs():
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(N, DIM, generator=generator).requires_grad_() for _ in range(2))
    teacher_head, student_head = (
        torch.randn(VOCAB, DIM, generator=generator).requires_grad_() for _ in range(2)
    )
    return teacher, student, teacher_head, student_head


def loss_of(inputs, beta, temperature=0.7, n=3):
    teacher, student, teacher_head, student_head = inputs
    heads = (lambda h: h @ teacher_head.T, lambda h: h @ student_head.T)
    return distillation_loss(teacher, student, *heads, temperature, VOCAB, n, beta=beta)


def by_definition(inputs, beta):
    """TRL's generalized_jsd_loss: β·KL(T ‖ M) + (1 − β)·KL(S ‖ M), M = (1 − β)·S + β·T; KLs at both ends."""
    teacher, student, teacher_head, student_head = inputs
    p = (teacher @ teacher_head.T / 0.7).softmax(-1).detach()
    q = (student @ student_head.T / 0.7).softmax(-1)
    if beta in (0, 1):
        first, second = (p, q) if beta == 0 else (q, p)
        return (first * (first / second).log()).sum() / 3
    m = (1 - beta) * q + beta * p
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum() / 3


@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1.0])
def test_loss_and_gradient_are_those_of_the_definition(beta):
    inputs = make_inputs()
    loss, expected = loss_of(inputs, beta), by_definition(inputs, beta)
    torch.testing.assert_close(loss, expected)
    trained = [inputs[1], inputs[3]]
    found = torch.autograd.grad(loss, trained, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected, trained))
    assert all(
        float((by_definition(inputs, other) - loss).detach().abs()) > 1e-3 for other in {0, 0.3, 1} - {beta}
    )


def test_the_kls_are_limits_of_the_divergence_over_beta():
    inputs = [each.detach().double() for each in make_inputs()]
    assert float(loss_of(inputs, 1e-8)) / 1e-8 == pytest.approx(float(loss_of(inputs, 0)), rel=2e-2)
    assert float(loss_of(inputs, 1 - 1e-8)) / 1e-8 == pytest.approx(float(loss_of(inputs, 1)), rel=2e-2)


def test_a_divergence_over_sets_is_that_of_the_renormalised_distributions():
    teacher, student, teacher_head, student_head = make_inputs()
    is_kept = torch.arange(VOCAB) < torch.tensor([1, 3, 7, 2, 5])[:, None]
    sets = TokenSets(is_kept.sum(1), is_kept.nonzero()[:, 1])
    heads = (lambda h: h @ teacher_head.T, lambda h: h @ student_head.T)
    loss = distillation_loss(teacher, student, *heads, 1.0, VOCAB, 1, beta=0.3, sets=sets)
    p, q = (
        (hidden @ head.T).masked_fill(~is_kept, -torch.inf).softmax(-1)
        for hidden, head in ((teacher, teacher_head), (student, student_head))
    )
    m = 0.7 * q + 0.3 * p
    terms = 0.3 * p * (p / m).log() + 0.7 * q * (q / m).log()
    torch.testing.assert_close(loss, terms[is_kept].sum())
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_no_gradient_reaches_the_teacher(beta):
    inputs = make_inputs()
    loss_of(inputs, beta).backward()
    assert inputs[0].grad is None
    assert inputs[2].grad is None
    assert inputs[1].grad is not None
