import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_rlkv.kernels.token_logps import policy_kl, token_logps

N_POSITIONS, DIM, VOCAB = 23, 8, 12


class CountingHead(nn.Module):
    """A linear head that remembers how many positions it was asked for at a time."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(seed)))
        self.sizes: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.sizes.append(len(hidden))
        return F.linear(hidden, self.weight)


def make_hidden(seed: int = 1) -> Tensor:
    return torch.randn(N_POSITIONS, DIM, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def make_tokens() -> Tensor:
    return torch.randint(0, VOCAB, (N_POSITIONS,), generator=torch.Generator().manual_seed(2))


def hand_logits(*logits: float) -> Tensor:
    """One position whose hidden state already is its logits."""
    return torch.tensor([logits])


def test_logps_and_entropy_match_hand_arithmetic():
    # Logits 0 and log 3 are probabilities 1/4 and 3/4.
    hidden = hand_logits(0.0, math.log(3))
    logp, entropy = token_logps(hidden, nn.Identity(), torch.tensor([1]), 1.0, vocab_size=2)
    assert logp.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))


def test_temperature_divides_the_logits():
    # Logits 0 and log 9 at temperature 2 are 0 and log 3.
    hidden = hand_logits(0.0, math.log(9))
    logp, _ = token_logps(hidden, nn.Identity(), torch.tensor([0]), 2.0, vocab_size=2)
    assert logp.item() == pytest.approx(math.log(0.25))


def test_logps_are_those_of_cross_entropy():
    hidden, head, tokens = make_hidden(), CountingHead(), make_tokens()
    logps, _ = token_logps(hidden, head, tokens, 0.7, VOCAB)
    torch.testing.assert_close(logps, -F.cross_entropy(head(hidden) / 0.7, tokens, reduction="none"))


def test_the_entropy_carries_no_gradient():
    logps, entropy = token_logps(make_hidden(), CountingHead(), make_tokens(), 1.0, VOCAB)
    assert logps.requires_grad
    assert not entropy.requires_grad


def test_kl_matches_hand_arithmetic_in_both_directions():
    # p = (1/4, 3/4), q = (1/2, 1/2).
    p, q = hand_logits(0.0, math.log(3)), hand_logits(0.0, 0.0)
    head = nn.Identity()
    forward = policy_kl(p, q, head, head, 1.0, vocab_size=2)
    backward = policy_kl(q, p, head, head, 1.0, vocab_size=2)
    assert forward.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert backward.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


def test_kl_of_a_policy_with_itself_is_zero_and_positive_otherwise():
    p, q, head = make_hidden(1), make_hidden(2), CountingHead()
    assert (policy_kl(p, p, head, head, 0.7, VOCAB) == 0).all()
    assert (policy_kl(p, q, head, head, 0.7, VOCAB) > 0).all()


def test_kl_is_that_of_torch_with_a_head_for_each_side():
    p, q, head_p, head_q = make_hidden(1), make_hidden(2), CountingHead(3), CountingHead(4)
    log_p, log_q = ((head(x) / 0.7).log_softmax(-1) for head, x in ((head_p, p), (head_q, q)))
    expected = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(policy_kl(p, q, head_p, head_q, 0.7, VOCAB), expected)


def run_with_gradients(head: CountingHead) -> list[Tensor]:
    """Log-probs and KL, and the gradients of a weighted sum of them."""
    p, q, weight = make_hidden(1), make_hidden(2), torch.linspace(-1, 1, N_POSITIONS)
    logps, entropy = token_logps(p, head, make_tokens(), 0.7, VOCAB)
    kl = policy_kl(p, q, head, head, 0.7, VOCAB)
    gradients = torch.autograd.grad((weight * (logps + kl)).sum(), [p, q, head.weight])
    return [logps, entropy, kl, *gradients]


def test_chunks_change_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch):
    whole = run_with_gradients(CountingHead())
    monkeypatch.setattr("lit_rlkv.kernels.token_logps.reference.MAX_CHUNK_LOGITS", 5 * VOCAB)
    head = CountingHead()
    chunked = run_with_gradients(head)
    assert max(head.sizes) == 5
    for a, b in zip(chunked, whole, strict=True):
        torch.testing.assert_close(a, b)


def test_a_vocabulary_larger_than_a_chunk_goes_one_position_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_rlkv.kernels.token_logps.reference.MAX_CHUNK_LOGITS", VOCAB - 1)
    head = CountingHead()
    token_logps(make_hidden(), head, make_tokens(), 1.0, VOCAB)
    assert head.sizes == [1] * N_POSITIONS


def test_logits_are_not_kept_for_the_backward_pass():
    head, saved = CountingHead(), []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        logps, _ = token_logps(make_hidden(), head, make_tokens(), 1.0, VOCAB)
    assert (N_POSITIONS, VOCAB) not in saved
    logps.sum().backward()
    assert head.sizes == [N_POSITIONS] * 2  # computed again


def test_no_positions_are_no_error():
    nothing = torch.zeros(0, DIM)
    logps, entropy = token_logps(nothing, CountingHead(), torch.zeros(0, dtype=torch.long), 1.0, VOCAB)
    kl = policy_kl(nothing, nothing, CountingHead(), CountingHead(), 1.0, VOCAB)
    assert logps.shape == entropy.shape == kl.shape == (0,)
