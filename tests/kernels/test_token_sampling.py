"""Token sampling: log-probs against float64, tokens against the same noise computed by numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kernels.token_logps.reference import chosen_logps_and_entropy
from lit_rlkv.kernels.token_sampling import NoiseRows, kernel, sample_tokens, sample_tokens_and_entropy
from lit_rlkv.rollout.graph import CudaGraphRunner
from lit_rlkv.rollout.sampling import sample
from lit_rlkv.settings import Sampling
from tests.kernels.accuracy import bound, excess_error
from tests.tiers import diagonal

# numpy speaks of -inf - -inf and of log 0, which the kernels meet and do not add up.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURE = 0.7
BLOCK = 32
"""A block of the tests, so that small vocabularies have several."""
SHAPES = [(1, 1), (1, 1000), (24, 17), (12, 33), (6, 130), (3, 64)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["usual", "peaked", "equal", "masked"]
CRITICAL = 24.3
"""0.1 % point of chi-square with 7 degrees of freedom."""

Draw = Callable[[Tensor, float, Tensor], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _small_blocks_and_outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(kernel, "BLOCK", BLOCK)


def make_logits(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> Tensor:
    logits = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if kind == "peaked":
        logits = torch.where(logits > 2, 100.0, -100.0) + logits
    if kind == "equal":
        logits = torch.full_like(logits, 3.0)
    if kind == "masked":  # whole blocks of them, and the last token counts
        logits[:, : 3 * shape[1] // 5] = -torch.inf
    return logits.to(dtype).to(DEVICE)


def seed_of(number: int) -> Tensor:
    return torch.tensor([number], device=DEVICE)


def philox(key: int, *counter: np.ndarray | int) -> np.ndarray:
    """First word of Philox 4x32 after 10 rounds (doi:10.1145/2063384.2063405), as Random123 writes it."""
    c0, c1, c2, c3 = (np.broadcast_to(np.asarray(c, np.uint64), np.shape(counter[0])) for c in counter)
    low, k0, k1 = np.uint64(0xFFFFFFFF), key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0), (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & low, first & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0


def gumbel(seed: int, size: int, row: int | np.ndarray, kind: int) -> np.ndarray:
    """Float64 noise of tokens (kind 0) or blocks (kind 1) of a row, or of each of the rows [row, 1]."""
    index = np.arange(size) + 0 * np.asarray(row)
    v = (philox(seed, index, row, kind, 0).astype(np.float64) + 0.5) / 2**32
    return -np.log(-np.log1p(-v))


def expected_token(logits: Tensor, temperature: float, seed: int, row: int) -> int:
    """The token that the noise of a row chooses: first a block, then a token of that block."""
    x = logits[row].double().cpu().numpy() / temperature
    starts = range(0, len(x), BLOCK)
    masses = np.array([np.logaddexp.reduce(x[start : start + BLOCK]) for start in starts])
    start = BLOCK * int(np.argmax(masses + gumbel(seed, len(masses), row, 1)))
    scores = x[start : start + BLOCK] + gumbel(seed, len(x), row, 0)[start : start + BLOCK]
    return start + int(np.argmax(scores))


def test_the_noise_of_the_tests_is_philox():
    # The known answer of Random123 for a key and a counter of 0, and of all ones.
    assert philox(0, 0, 0, 0, 0) == 0x6627E8D5
    assert philox(2**64 - 1, *(4 * [2**32 - 1])) == 0x408F276D


@pytest.mark.parametrize(("shape", "kind", "dtype"), diagonal(SHAPES, KINDS, DTYPES))
def test_log_probs_and_entropy_are_as_accurate_as_torch(
    shape: tuple[int, int], kind: str, dtype: torch.dtype
):
    assert value_error(kernel.sample_with_seed, make_logits(shape, kind, dtype)) <= bound(torch.float32)


def value_error(draw: Draw, logits: Tensor) -> float:
    """Largest error of log-probs and entropies, in units of plain PyTorch's error on float32 logits."""
    tokens, *values = draw(logits, TEMPERATURE, seed_of(5))
    plain = chosen_logps_and_entropy(logits, tokens, TEMPERATURE)
    truth = chosen_logps_and_entropy(logits.double(), tokens, TEMPERATURE)
    assert all(value.dtype == torch.float32 for value in values)
    triples = zip(values, plain, truth, strict=True)
    # What is exactly right has no error, even where plain PyTorch has none either.
    return max(0.0 if torch.equal(each[0].double(), each[2]) else excess_error(*each) for each in triples)


def test_the_comparison_catches_a_token_off_by_one():
    def shifted(logits: Tensor, temperature: float, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, logps, entropy = kernel.sample_with_seed(logits, temperature, seed)
        return (tokens + 1) % logits.shape[1], logps, entropy

    assert value_error(shifted, make_logits((12, 33), "usual", torch.float16)) > 100.0


def test_the_comparison_catches_a_temperature_forgotten():
    def untempered(logits: Tensor, temperature: float, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return kernel.sample_with_seed(logits, 1.0, seed)

    assert value_error(untempered, make_logits((12, 33), "usual", torch.float16)) > 100.0


@pytest.mark.parametrize(("shape", "kind", "dtype"), diagonal(SHAPES, KINDS, DTYPES))
def test_the_token_is_the_one_that_the_noise_chooses(shape: tuple[int, int], kind: str, dtype: torch.dtype):
    logits, seed = make_logits(shape, kind, dtype), 2**62 + 12345
    tokens, _, _ = kernel.sample_with_seed(logits, TEMPERATURE, seed_of(seed))
    assert tokens.tolist() == [expected_token(logits, TEMPERATURE, seed, row) for row in range(shape[0])]


def test_other_noise_chooses_other_tokens():
    logits = make_logits((24, 130), "usual", torch.float32)
    tokens, _, _ = kernel.sample_with_seed(logits, TEMPERATURE, seed_of(7))
    for wrong in (8, 7 + 2**32):  # either half of the seed
        assert tokens.tolist() != [expected_token(logits, TEMPERATURE, wrong, row) for row in range(24)]


def drawn_in_numpy(logits: Tensor, temperature: float, n_draws: int, kinds: tuple[int, int]) -> np.ndarray:
    """Tokens of `n_draws` rows with the same logits; `kinds` of the noise of tokens and of blocks."""
    x = logits.double().numpy() / temperature
    starts = range(0, len(x), BLOCK)
    masses = np.array([np.logaddexp.reduce(x[start : start + BLOCK]) for start in starts])
    padded = np.full(len(masses) * BLOCK, -np.inf)
    padded[: len(x)] = x
    rows = np.arange(n_draws)[:, None]
    blocks = np.argmax(masses + gumbel(3, len(masses), rows, kinds[1]), axis=1)
    scores = padded + gumbel(3, len(padded), rows, kinds[0])
    is_in_block = np.arange(len(padded)) // BLOCK == blocks[:, None]
    return np.argmax(np.where(is_in_block, scores, -np.inf), axis=1)


def chi_square(drawn_at: float, tested_at: float, kinds: tuple[int, int] = (0, 1)) -> float:
    """Statistic of draws from 8 tokens in 3 blocks, among others of probability 0."""
    n_draws, places = 20_000, torch.tensor([0, 1, 2, 3, 40, 41, 42, 70])
    values = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5])
    logits = torch.full((80,), -torch.inf).index_put((places,), values)
    tokens = drawn_in_numpy(logits, drawn_at, n_draws, kinds)
    if kinds == (0, 1):  # the kernel draws these very tokens
        some = kernel.sample_with_seed(logits.expand(24, -1).to(DEVICE), drawn_at, seed_of(3))[0]
        assert some.tolist() == tokens[:24].tolist()
    counts = np.bincount(tokens, minlength=80)[places]
    assert counts.sum() == n_draws  # none of probability 0
    expected = n_draws * (values / tested_at).softmax(-1).numpy()
    return float((np.square(counts - expected) / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_are_drawn_from_the_softmax(temperature: float):
    assert chi_square(temperature, temperature) < CRITICAL


def test_the_test_tells_a_slightly_wrong_temperature():
    assert chi_square(1.05, 1.0) > CRITICAL


def test_the_test_tells_noise_that_blocks_and_tokens_share():
    assert chi_square(1.0, 1.0, kinds=(1, 1)) > CRITICAL


def test_the_noise_is_right_where_little_decides(monkeypatch: pytest.MonkeyPatch):
    """The largest noise of a vocabulary comes from the smallest uniform numbers, which float32 must keep."""
    block, n = 4096, 2**15
    monkeypatch.setattr(kernel, "BLOCK", block)
    logits = torch.zeros(1, n, device=DEVICE)
    noise = gumbel(11, n, 0, 0)
    assert noise.max() > 9.5
    # The token with the largest noise of its block wins it, also by a margin of 1e-4.
    tokens, _, _ = kernel.sample_with_seed(logits, 1.0, seed_of(11))
    start = int(tokens) // block * block
    rival = int(np.argsort(noise[start : start + block])[-2]) + start
    margin = float(noise[int(tokens)] - noise[rival])
    for slack, winner in ((-1e-4, int(tokens)), (1e-4, rival)):
        raised = torch.full_like(logits, -torch.inf)
        raised[0, start : start + block] = 0
        raised[0, rival] = margin + slack
        assert kernel.sample_with_seed(raised, 1.0, seed_of(11))[0].item() == winner


@pytest.mark.parametrize("poison", [[0.0, torch.nan, 1.0], [-torch.inf] * 3, [0.0, torch.inf, 1.0]])
def test_logits_without_a_distribution_are_not_hidden(poison: list[float]):
    logits = torch.tensor([poison, [0.0, 0.0, 0.0]], device=DEVICE)
    tokens, logps, entropy = kernel.sample_with_seed(logits, 1.0, seed_of(0))
    assert logps.isnan().tolist() == entropy.isnan().tolist() == [True, False]
    assert 0 <= tokens.min() <= tokens.max() < 3  # an index of the embedding in any case


def test_the_layout_of_the_logits_changes_nothing():
    logits = make_logits((5, 130), "usual", torch.float16)
    expected = kernel.sample_with_seed(logits, TEMPERATURE, seed_of(1))
    padded = torch.nn.functional.pad(logits, (3, 4), value=torch.inf)[:, 3:-4]
    for laid_out in (padded, logits.T.contiguous().T, logits[:1].expand(5, -1)):
        actual = kernel.sample_with_seed(laid_out, TEMPERATURE, seed_of(1))
        rows = slice(None) if laid_out.stride(0) else slice(1)
        assert all(torch.equal(a[rows], b[rows]) for a, b in zip(actual, expected, strict=True))


def test_rows_have_noise_of_their_own_that_other_rows_do_not_change():
    logits = make_logits((1, 130), "equal", torch.float32).expand(20, -1)
    tokens, _, _ = kernel.sample_with_seed(logits, 1.0, seed_of(2))
    assert len(set(tokens.tolist())) > 10
    assert torch.equal(kernel.sample_with_seed(logits[:7], 1.0, seed_of(2))[0], tokens[:7])


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_rows_that_go_on_alone_draw_what_they_would_beside_the_others(kernels: str):
    logits = make_logits((8, 130), "usual", torch.float32)
    rows = torch.tensor([6, 1, 3], device=DEVICE)
    with use_kernels(kernels):
        alone, beside = torch.Generator(DEVICE).manual_seed(4), torch.Generator(DEVICE).manual_seed(4)
        for _ in range(3):
            drawn = sample_tokens(logits[rows], 1.0, alone, NoiseRows(rows, 8))
            expected = sample_tokens(logits, 1.0, beside)
            assert all(torch.equal(a, b[rows]) for a, b in zip(drawn, expected, strict=True))


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_a_generator_draws_the_same_again_and_goes_on(kernels: str):
    logits = make_logits((8, 130), "usual", torch.float32)
    generator = torch.Generator(DEVICE).manual_seed(4)
    with use_kernels(kernels):
        first, second = (sample(logits, Sampling(), generator)[0] for _ in range(2))
        generator.manual_seed(4)
        tokens, logps, entropy = sample_tokens_and_entropy(logits, 1.0, generator)
    assert torch.equal(first, tokens)
    assert not torch.equal(first, second)
    plain = chosen_logps_and_entropy(logits, tokens, 1.0)
    torch.testing.assert_close((logps, entropy), plain)


def test_each_choice_runs_its_own_implementation(monkeypatch: pytest.MonkeyPatch):
    logits, ran = make_logits((2, 33), "usual", torch.float32), []
    original = kernel.sample_with_seed
    monkeypatch.setattr(kernel, "sample_with_seed", lambda *args: ran.append(1) or original(*args))
    sample_tokens(logits, 1.0, None, kernels="reference")
    assert ran == []
    sample_tokens(logits, 1.0, None, kernels="triton")
    assert ran == [1]


def test_the_definition_draws_what_it_drew_before_there_was_a_kernel():
    # Recorded runs on a CPU must not change: softmax over exponential noise, in float32.
    logits = make_logits((8, 130), "usual", torch.bfloat16)
    tokens, logps = sample_tokens(logits, 0.7, torch.Generator(DEVICE).manual_seed(4), kernels="reference")
    expected = (logits.float() / 0.7).log_softmax(-1)
    noise = torch.zeros_like(expected).exponential_(generator=torch.Generator(DEVICE).manual_seed(4))
    assert torch.equal(tokens, (expected.exp() / noise).argmax(-1))
    assert torch.equal(logps, expected.gather(-1, tokens[:, None])[:, 0])


@pytest.mark.gpu
def test_replays_of_a_captured_graph_draw_as_eager_calls_do():
    logits = make_logits((8, 1000), "usual", torch.float32)
    drawn = {}
    for is_enabled in (False, True):
        generator = torch.Generator(DEVICE).manual_seed(4)
        runner, tokens = (
            CudaGraphRunner(generator, is_enabled=is_enabled),
            torch.zeros(8, device=DEVICE).long(),
        )
        steps = drawn[is_enabled] = []
        for _ in range(8):
            runner(
                lambda tokens=tokens, generator=generator: tokens.copy_(
                    sample(logits, Sampling(), generator)[0]
                )
            )
            steps.append(tokens.tolist())
    assert drawn[True] == drawn[False]
    assert len({tuple(step) for step in drawn[True]}) == 8
