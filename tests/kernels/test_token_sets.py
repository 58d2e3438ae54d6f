"""Log-probs, entropy and KL over sets of tokens, against a softmax of the whole vocabulary with -inf."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kernels.backend import is_interpreted, use_kernels
from lit_rlkv.kernels.token_logps import TokenSets, policy_kl, token_logps, token_logps_and_entropy

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

N_POSITIONS, DIM, VOCAB, TEMPERATURE = 13, 8, 60, 0.7
LARGEST = {"narrow": 15, "wide": 16}
"""Sets of at most a quarter of the vocabulary are gathered, larger ones are masked."""


@pytest.fixture(autouse=True, params=["reference", "triton"])
def _with_both_implementations(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "triton" and not is_interpreted():
        pytest.skip("tensors on the CPU need Triton's interpreter, which is off where there is a GPU")
    with use_kernels(request.param):
        yield


class Case:
    """Random hidden states and head; sets of 1 to `largest` tokens, each with the token of its position."""

    def __init__(self, largest: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(N_POSITIONS, DIM, generator=generator)
        self.other = torch.randn(N_POSITIONS, DIM, generator=generator)
        self.weight = torch.randn(VOCAB, DIM, generator=generator)
        sizes = torch.randint(1, largest + 1, (N_POSITIONS,), generator=generator)
        sizes[:3] = torch.tensor([1, largest, 1])
        ids = [torch.randperm(VOCAB, generator=generator)[:n] for n in sizes.tolist()]
        self.is_kept = torch.stack([torch.zeros(VOCAB).scatter(0, row, 1.0) for row in ids]).bool()
        self.tokens = torch.stack([row[len(row) // 2] for row in ids])
        self.sets = TokenSets(sizes.int(), torch.cat(ids).int())

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def expected(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden) / TEMPERATURE
        return logits.masked_fill(~self.is_kept, -torch.inf).log_softmax(-1)

    def expected_kl(self, p: Tensor, q: Tensor) -> Tensor:
        log_p, log_q = self.expected(p), self.expected(q)
        return (log_p.exp() * (log_p - log_q).masked_fill(~self.is_kept, 0.0)).sum(-1)


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("max_logits", [2**20, 4 * VOCAB])
def test_log_probs_and_gradients_are_those_of_the_renormalised_set(kind, frozen, max_logits, monkeypatch):
    monkeypatch.setattr("lit_rlkv.kernels.token_logps.reference.MAX_CHUNK_LOGITS", max_logits)
    monkeypatch.setattr("lit_rlkv.kernels.token_logps.chunks.TRITON_MAX_CHUNK_LOGITS", max_logits)
    case = Case(LARGEST[kind])
    case.hidden.requires_grad_()
    case.weight.requires_grad_(not frozen)
    upstream = torch.randn(N_POSITIONS, generator=torch.Generator().manual_seed(3))
    inputs = [case.hidden] if frozen else [case.hidden, case.weight]
    found = token_logps(
        case.hidden, case.head, case.tokens, TEMPERATURE, VOCAB, head_is_frozen=frozen, sets=case.sets
    )
    expected = case.expected(case.hidden).gather(1, case.tokens[:, None])[:, 0]
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad((found * upstream).sum(), inputs)
    for gradient, wanted in zip(
        gradients, torch.autograd.grad((expected * upstream).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LARGEST)
def test_the_gradient_flows_through_kept_logits_alone(kind):
    case = Case(LARGEST[kind])
    logits = case.head(case.hidden).requires_grad_()
    token_logps(logits, lambda x: x, case.tokens, TEMPERATURE, VOCAB, sets=case.sets).sum().backward()
    assert (logits.grad[~case.is_kept] == 0).all()
    many = case.is_kept.sum(1) > 1
    assert (logits.grad[case.is_kept & many[:, None]] != 0).all()


@pytest.mark.parametrize("kind", LARGEST)
def test_entropy_and_kl_are_those_of_the_renormalised_set(kind):
    case = Case(LARGEST[kind])
    logps, entropy = token_logps_and_entropy(
        case.hidden, case.head, case.tokens, TEMPERATURE, VOCAB, sets=case.sets
    )
    alone = token_logps(case.hidden, case.head, case.tokens, TEMPERATURE, VOCAB, sets=case.sets)
    assert torch.equal(logps, alone)
    log_p = case.expected(case.hidden)
    torch.testing.assert_close(
        entropy, -(log_p.exp() * log_p.masked_fill(~case.is_kept, 0.0)).sum(-1), atol=1e-6, rtol=1e-5
    )
    hidden = [case.hidden.requires_grad_(), case.other.requires_grad_()]
    found = policy_kl(*hidden, case.head, case.head, TEMPERATURE, VOCAB, sets=case.sets)
    expected = case.expected_kl(*hidden)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(found.sum(), hidden)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.sum(), hidden), strict=True):
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LARGEST)
def test_a_set_with_another_token_or_without_the_chosen_one_is_noticed(kind):
    case = Case(LARGEST[kind])

    def logps(sets: TokenSets) -> Tensor:
        return token_logps(case.hidden, case.head, case.tokens, TEMPERATURE, VOCAB, sets=sets)

    right = logps(case.sets)
    assert (right[[0, 2]] == 0).all()  # sets of one token
    moved = TokenSets(case.sets.counts, (case.sets.token_ids + 1) % VOCAB)
    assert (logps(moved)[[0, 2]] == -torch.inf).all()
    whole = token_logps(case.hidden, case.head, case.tokens, TEMPERATURE, VOCAB)
    assert (whole < right - 1e-4).all()


def test_no_positions_are_no_error():
    empty = TokenSets(torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    case = Case(4)
    found = token_logps(case.hidden[:0], case.head, case.tokens[:0], TEMPERATURE, VOCAB, sets=empty)
    assert found.shape == (0,)
