import pytest
import torch

from lit_rlkv.objectives.distillation import distillation_kl

VOCAB, DIM, N = 7, 4, 5


def make_inputs():
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(N, DIM, generator=generator).requires_grad_() for _ in range(2))
    teacher_head, student_head = (
        torch.randn(VOCAB, DIM, generator=generator).requires_grad_() for _ in range(2)
    )
    return teacher, student, teacher_head, student_head


@pytest.mark.parametrize("reverse", [False, True])
def test_loss_and_gradient_are_those_of_the_definition(reverse):
    teacher, student, teacher_head, student_head = make_inputs()
    loss = distillation_kl(
        teacher, student, lambda h: h @ teacher_head.T, lambda h: h @ student_head.T, 0.7, VOCAB, 3,
        reverse=reverse,
    )  # fmt: skip
    of_teacher = (teacher @ teacher_head.T / 0.7).log_softmax(-1).detach()
    of_student = (student @ student_head.T / 0.7).log_softmax(-1)
    log_p, log_q = (of_student, of_teacher) if reverse else (of_teacher, of_student)
    expected = (log_p.exp() * (log_p - log_q)).sum() / 3
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, [student, student_head], retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [student, student_head]))


@pytest.mark.parametrize("reverse", [False, True])
def test_no_gradient_reaches_the_teacher(reverse):
    teacher, student, teacher_head, student_head = make_inputs()
    loss = distillation_kl(
        teacher, student, lambda h: h @ teacher_head.T, lambda h: h @ student_head.T, 1.0, VOCAB, N,
        reverse=reverse,
    )  # fmt: skip
    loss.backward()
    assert teacher.grad is None
    assert teacher_head.grad is None
    assert student.grad is not None


def test_swapping_the_direction_changes_the_loss():
    teacher, student, teacher_head, student_head = make_inputs()
    forward, backward = (
        distillation_kl(
            teacher, student, lambda h: h @ teacher_head.T, lambda h: h @ student_head.T, 1.0, VOCAB, N,
            reverse=reverse,
        )
        for reverse in (False, True)
    )  # fmt: skip
    assert abs(forward - backward) > 1e-3
