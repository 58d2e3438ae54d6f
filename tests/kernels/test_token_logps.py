import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_rlkv.kernels.backend import is_interpreted, use_kernels
from lit_rlkv.kernels.token_logps import TokenSets, policy_kl, token_logps, token_logps_and_entropy
from tests.kernels.accuracy import bound, excess_error
from tests.tiers import diagonal, slow

# numpy speaks of -inf - -inf, which the kernels meet and do not add up.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

N_POSITIONS, DIM, VOCAB = 13, 8, 12


@pytest.fixture(autouse=True, params=["reference", "triton"])
def _with_both_implementations(request: pytest.FixtureRequest) -> Iterator[None]:
    is_on_cpu = request.node.get_closest_marker("gpu") is None
    if request.param == "triton" and is_on_cpu and not is_interpreted():
        pytest.skip("tensors on the CPU need Triton's interpreter, which is off where there is a GPU")
    with use_kernels(request.param):
        yield


class CountingHead(nn.Module):
    """A linear head that remembers how many positions it was asked for at a time."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB, *, is_frozen: bool = False) -> None:
        super().__init__()
        weight = torch.randn(vocab, DIM, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight, requires_grad=not is_frozen)
        self.sizes: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) > 0:
            self.sizes.append(len(hidden))
        return F.linear(hidden, self.weight)


def set_chunk(monkeypatch: pytest.MonkeyPatch, n_logits: int) -> None:
    monkeypatch.setattr("lit_rlkv.kernels.token_logps.reference.MAX_CHUNK_LOGITS", n_logits)
    monkeypatch.setattr("lit_rlkv.kernels.token_logps.chunks.TRITON_MAX_CHUNK_LOGITS", n_logits)


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
    logp, entropy = token_logps_and_entropy(hidden, nn.Identity(), torch.tensor([1]), 1.0, vocab_size=2)
    assert logp.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))


def test_temperature_divides_the_logits():
    # Logits 0 and log 9 at temperature 2 are 0 and log 3.
    hidden = hand_logits(0.0, math.log(9))
    logp = token_logps(hidden, nn.Identity(), torch.tensor([0]), 2.0, vocab_size=2)
    assert logp.item() == pytest.approx(math.log(0.25))


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


WIDE_VOCAB = 60
LARGEST = {"whole": WIDE_VOCAB, "narrow": 15, "wide": 16}
"""Sets of at most a quarter of the vocabulary are gathered, larger ones are masked."""


class Case:
    """Random hidden states and heads; sets of 1 to so many tokens, each with the token of its position."""

    def __init__(self, kind: str) -> None:
        generator, largest = torch.Generator().manual_seed(0), LARGEST[kind]
        self.p, self.q = torch.randn(2, N_POSITIONS, DIM, generator=generator).requires_grad_()
        self.heads = [CountingHead(seed, WIDE_VOCAB) for seed in (3, 4)]
        sizes = torch.randint(1, largest + 1, (N_POSITIONS,), generator=generator)
        sizes[:3] = torch.tensor([1, largest, 1])
        sizes = torch.full_like(sizes, WIDE_VOCAB) if kind == "whole" else sizes
        ids = [torch.randperm(WIDE_VOCAB, generator=generator)[:n] for n in sizes.tolist()]
        self.is_kept = torch.stack([torch.zeros(WIDE_VOCAB).scatter(0, row, 1.0) for row in ids]).bool()
        self.tokens = torch.stack([row[len(row) // 2] for row in ids])
        self.sets = None if kind == "whole" else TokenSets(sizes.int(), torch.cat(ids).int())

    def expected(self) -> list[Tensor]:
        """Log-probs, entropies and KL by a softmax of the whole vocabulary with -inf."""
        log_p, log_q = (
            (head(x) / 0.7).masked_fill(~self.is_kept, -torch.inf).log_softmax(-1)
            for head, x in zip(self.heads, (self.p, self.q), strict=True)
        )
        logps = log_p.gather(1, self.tokens[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p.masked_fill(~self.is_kept, 0.0)).sum(-1)
        kl = (log_p.exp() * (log_p - log_q).masked_fill(~self.is_kept, 0.0)).sum(-1)
        return [logps, entropy, kl]


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("positions", [1000, 5])
def test_values_and_gradients_are_those_of_a_plain_softmax(
    kind: str, is_frozen: bool, positions: int, monkeypatch: pytest.MonkeyPatch
):
    set_chunk(monkeypatch, positions * WIDE_VOCAB)
    case, options = Case(kind), {"temperature": 0.7, "vocab_size": WIDE_VOCAB}
    inputs, upstream = [case.p, case.q], torch.linspace(-1, 1, N_POSITIONS)
    for head in case.heads:
        head.weight.requires_grad_(not is_frozen)
        inputs += [] if is_frozen else [head.weight]
    expected = case.expected()
    wanted = torch.autograd.grad((upstream * (expected[0] + expected[2])).sum(), inputs)
    for head in case.heads:
        head.sizes.clear()
    of_p = (case.p, case.heads[0], case.tokens)
    logps, entropy = token_logps_and_entropy(*of_p, **options, head_is_frozen=is_frozen, sets=case.sets)
    kl = policy_kl(case.p, case.q, *case.heads, **options, heads_are_frozen=is_frozen, sets=case.sets)
    assert not entropy.requires_grad
    for found, value in zip((logps, entropy, kl), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((upstream * (logps + kl)).sum(), inputs)
    for found, value in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
    # A frozen head is asked once, of one policy and of the two whose KL it is, and another one twice.
    assert sum(sum(head.sizes) for head in case.heads) == (1 if is_frozen else 2) * 3 * N_POSITIONS
    assert max(case.heads[0].sizes) == min(positions, N_POSITIONS)
    alone = token_logps(*of_p, **options, head_is_frozen=is_frozen, sets=case.sets)
    assert torch.equal(alone, logps)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_divergence_between_both_kls_is_that_of_its_definition(is_frozen: bool):
    p, q, head = make_hidden(1), make_hidden(3), CountingHead(is_frozen=is_frozen)
    found = policy_kl(p, q, head, head, 0.7, VOCAB, beta=0.3, heads_are_frozen=is_frozen)
    of_p, of_q = ((hidden @ head.weight.T / 0.7).softmax(-1) for hidden in (p, q))
    m = 0.3 * of_p + 0.7 * of_q
    expected = (0.3 * of_p * (of_p / m).log() + 0.7 * of_q * (of_q / m).log()).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    trained = [p, q] if is_frozen else [p, q, head.weight]
    weights = torch.arange(1.0, N_POSITIONS + 1)
    gradients = [torch.autograd.grad((one * weights).sum(), trained) for one in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    assert (policy_kl(q, p, head, head, 0.7, VOCAB, beta=0.3) - found).abs().max() > 1e-3


def test_a_vocabulary_larger_than_a_chunk_goes_one_position_at_a_time(monkeypatch: pytest.MonkeyPatch):
    set_chunk(monkeypatch, VOCAB - 1)
    head = CountingHead()
    token_logps(make_hidden(), head, make_tokens(), 1.0, VOCAB)
    assert head.sizes == [1] * N_POSITIONS


def test_logits_are_not_kept_for_the_backward_pass():
    head, saved = CountingHead(), []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        logps = token_logps(make_hidden(), head, make_tokens(), 1.0, VOCAB)
    assert (N_POSITIONS, VOCAB) not in saved
    logps.sum().backward()
    assert head.sizes == [N_POSITIONS] * 2  # computed again


@pytest.mark.parametrize("sets", [None, TokenSets(torch.zeros(0).int(), torch.zeros(0).int())])
def test_no_positions_are_no_error(sets: TokenSets | None):
    nothing, head = torch.zeros(0, DIM), CountingHead()
    logps, entropy = token_logps_and_entropy(nothing, head, torch.zeros(0).long(), 1.0, VOCAB, sets=sets)
    kl = policy_kl(nothing, nothing, head, head, 1.0, VOCAB, sets=sets)
    assert logps.shape == entropy.shape == kl.shape == (0,)


@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_the_gradient_flows_through_kept_logits_alone(kind):
    case = Case(kind)
    logits = case.heads[0](case.p).detach().requires_grad_()
    token_logps(logits, lambda x: x, case.tokens, 0.7, WIDE_VOCAB, sets=case.sets).sum().backward()
    assert (logits.grad[~case.is_kept] == 0).all()
    many = case.is_kept.sum(1) > 1
    assert (logits.grad[case.is_kept & many[:, None]] != 0).all()


@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_a_set_with_another_token_or_without_the_chosen_one_is_noticed(kind):
    case = Case(kind)

    def logps(sets: TokenSets) -> Tensor:
        return token_logps(case.p, case.heads[0], case.tokens, 0.7, WIDE_VOCAB, sets=sets)

    right = logps(case.sets)
    assert (right[[0, 2]] == 0).all()  # sets of one token
    moved = TokenSets(case.sets.counts, (case.sets.token_ids + 1) % WIDE_VOCAB)
    assert (logps(moved)[[0, 2]] == -torch.inf).all()
    whole = token_logps(case.p, case.heads[0], case.tokens, 0.7, WIDE_VOCAB)
    assert (whole < right - 1e-4).all()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_frozen_head_in_16_bit_loses_no_more_than_torch_does(is_frozen: bool):
    hidden, head, tokens = make_hidden(), CountingHead(is_frozen=True), make_tokens()
    upstream = torch.linspace(-1, 1, N_POSITIONS)

    def gradient(hidden: Tensor, head: CountingHead, function: Callable[..., Tensor]) -> Tensor:
        hidden = hidden.detach().requires_grad_()
        return torch.autograd.grad(function(hidden, head), [hidden], upstream.to(head.weight.dtype))[0]

    def plain(hidden: Tensor, head: CountingHead) -> Tensor:
        return -F.cross_entropy(head(hidden) / 0.7, tokens, reduction="none")

    truth = gradient(hidden.half().double(), head.half().double(), plain)
    hidden, head = hidden.half(), head.half()
    own = gradient(hidden, head, plain)

    def ours(hidden: Tensor, head: CountingHead, shift: int = 0) -> Tensor:
        shifted = (tokens + shift) % VOCAB
        return token_logps(hidden, head, shifted, 0.7, VOCAB, head_is_frozen=is_frozen).half()

    assert excess_error(gradient(hidden, head, ours), own, truth) <= bound(own.dtype)
    assert excess_error(gradient(hidden, head, lambda *args: ours(*args, shift=1)), own, truth) > 100.0


def test_a_head_called_frozen_that_learns_is_refused():
    p, q, frozen, trained = make_hidden(1), make_hidden(2), CountingHead(is_frozen=True), CountingHead()
    with pytest.raises(ValueError, match="parameters that require a gradient"):
        token_logps(p, trained, make_tokens(), 1.0, VOCAB, head_is_frozen=True)
    for heads in ((frozen, trained), (trained, frozen)):
        with pytest.raises(ValueError, match="parameters that require a gradient"):
            policy_kl(p, q, *heads, 1.0, VOCAB, heads_are_frozen=True)
    with torch.no_grad():
        token_logps(p, trained, make_tokens(), 1.0, VOCAB, head_is_frozen=True)


@pytest.mark.parametrize(("trained", "is_frozen"), diagonal(["p", "q", "neither"], [False, True]))
def test_a_side_of_the_kl_that_needs_no_gradient_gets_none(trained: str, is_frozen: bool):
    def run(trained: str, *, is_frozen: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        p, q = make_hidden(1).detach(), make_hidden(2).detach()
        p.requires_grad_(trained in ("p", "both"))
        q.requires_grad_(trained in ("q", "both"))
        head = CountingHead(is_frozen=True)
        kl = policy_kl(p, q, head, head, 0.7, VOCAB, heads_are_frozen=is_frozen)
        if kl.requires_grad:
            kl.sum().backward()
        return kl.detach(), p.grad, q.grad

    kl, p_gradient, q_gradient = run("both", is_frozen=False)
    actual = run(trained, is_frozen=is_frozen)
    assert torch.equal(actual[0], kl)
    torch.testing.assert_close(actual[1], p_gradient if trained == "p" else None)
    torch.testing.assert_close(actual[2], q_gradient if trained == "q" else None)


def test_a_head_behind_a_stop_gradient_gives_its_side_none():
    p, q, head = make_hidden(1), make_hidden(2), CountingHead(is_frozen=True)
    kl = policy_kl(p, q, lambda x: head(x).detach(), head, 0.7, VOCAB, heads_are_frozen=True)
    kl.sum().backward()
    assert p.grad is None
    assert q.grad is not None


@pytest.mark.parametrize("is_frozen", [slow(False), True])
def test_activation_checkpointing_around_it_changes_nothing(is_frozen: bool):
    head, tokens = CountingHead(is_frozen=True), make_tokens()

    def run(hidden: Tensor) -> Tensor:
        logps = token_logps(2 * hidden, head, tokens, 0.7, VOCAB, head_is_frozen=is_frozen)
        return logps.square()

    plain, checkpointed = make_hidden(), make_hidden()
    run(plain).sum().backward()
    checkpoint(run, checkpointed, use_reentrant=False).sum().backward()
    assert torch.equal(plain.grad, checkpointed.grad)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_under_autocast_the_logits_are_16_bit_and_the_results_float32(is_frozen: bool):
    head, hidden, dtypes = CountingHead(is_frozen=True), make_hidden(), []

    def watched(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        dtypes.append(logits.dtype)
        return logits

    with torch.autocast("cpu", dtype=torch.float16):
        logps, entropy = token_logps_and_entropy(
            hidden, watched, make_tokens(), 0.7, VOCAB, head_is_frozen=is_frozen
        )
    logps.sum().backward()
    assert set(dtypes) == {torch.float16}
    assert logps.dtype == entropy.dtype == hidden.grad.dtype == torch.float32
    exact = token_logps(again := make_hidden(), head, make_tokens(), 0.7, VOCAB)
    exact.sum().backward()
    torch.testing.assert_close(logps, exact, atol=0.02, rtol=0.002)
    torch.testing.assert_close(hidden.grad, again.grad, atol=0.02, rtol=0.002)


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize("is_frozen", [False, slow(True)])
def test_compiled_it_gives_the_same(is_frozen: bool):
    head, tokens = nn.Linear(DIM, VOCAB, bias=False).requires_grad_(False), make_tokens()

    def run(p: Tensor, q: Tensor) -> Tensor:
        logps = token_logps(p, head, tokens, 0.7, VOCAB, head_is_frozen=is_frozen)
        return logps + policy_kl(p, q, head, head, 0.7, VOCAB, heads_are_frozen=is_frozen)

    # Derivatives taken within the forward pass are run as they are, between two compiled graphs.
    compiled = torch.compile(run, backend="aot_eager", fullgraph=not is_frozen)
    inputs = [make_hidden(1), make_hidden(2)]
    expected, actual = run(*inputs), compiled(*inputs)
    torch.testing.assert_close(actual, expected)
    gradients = (torch.autograd.grad(x.square().sum(), inputs) for x in (actual, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("is_frozen", [False, True])
def test_real_sizes_are_as_accurate_as_torch(is_frozen: bool):
    n_positions, dim, vocab = 2000, 512, 151_936  # two chunks
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(vocab, dim, generator=generator, device="cuda").bfloat16() / 8
    p, q = torch.randn(2, n_positions, dim, generator=generator, device="cuda").bfloat16()
    tokens = torch.randint(0, vocab, (n_positions,), generator=generator, device="cuda")
    upstream = torch.randn(n_positions, generator=generator, device="cuda")

    def results(dtype: torch.dtype, *, shift: int = 0, is_frozen: bool = False) -> list[Tensor]:
        inputs = [x.to(dtype).detach().requires_grad_() for x in (p, q)]
        head = partial(F.linear, weight=weight.to(dtype))
        shifted = (tokens + shift) % vocab
        logps, entropy = token_logps_and_entropy(
            inputs[0], head, shifted, 0.7, vocab, head_is_frozen=is_frozen
        )
        kl = policy_kl(*inputs, head, head, 0.7, vocab, heads_are_frozen=is_frozen)
        gradients = torch.autograd.grad(((logps + kl) * upstream).sum(), inputs)
        return [logps.detach(), entropy, kl.detach(), *gradients]

    def error(actual: list[Tensor]) -> float:
        return max(excess_error(*each) for each in zip(actual, plain, truth, strict=True))

    with use_kernels("reference"):
        truth, plain = results(torch.float64), results(torch.bfloat16)
    assert error(results(torch.bfloat16, is_frozen=is_frozen)) <= bound(torch.bfloat16)
    assert error(results(torch.bfloat16, shift=1, is_frozen=is_frozen)) > 100.0
