import math

import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.diagnostics import covariance
from lit_rlkv.diagnostics.covariance import CountSketch, PartGradients, Spread, block_of

NAMES = {
    "roles.backbones.shared.model.layers.3.self_attn.q_proj.lora_A.policy.weight": ("layer_3", "q_proj.A"),
    "roles.backbones.policy.model.layers.11.mlp.down_proj.weight": ("layer_11", "down_proj"),
    "roles.backbones.policy.model.layers.0.mlp.experts.7.up_proj.weight": ("layer_0", "up_proj"),
    "roles.backbones.policy.transformer.h.2.ln_1.bias": ("layer_2", "ln_1"),
    "roles.backbones.policy.model.embed_tokens.weight": ("rest", "embed_tokens"),
}


def of_parts(values: list[list[float]], sizes: list[int], shares: list[float] | None = None) -> PartGradients:
    """Parts with one block of parameters, `x`."""
    found = PartGradients()
    for value, size, share in zip(values, sizes, shares or [None] * len(sizes), strict=True):
        found.add({"x": torch.tensor(value)}, size, share)
    return found


def spread_of(found: PartGradients) -> Spread:
    spread = found.spread()
    assert spread is not None
    return spread


def test_the_spread_of_unequal_parts_matches_hand_arithmetic():
    # parts 1, 3 and 8 of 1, 1 and 2 prompts: mean (1 + 3 + 2·8) / 4 = 5
    # tr Σ = (1·(1 − 5)² + 1·(3 − 5)² + 2·(8 − 5)²) / (3 − 1) = (16 + 4 + 18) / 2 = 19
    spread = spread_of(of_parts([[1.0], [3.0], [8.0]], [1, 1, 2]))
    assert spread.per_prompt.item() == pytest.approx(19)
    assert spread.variance.item() == pytest.approx(19 / 4)
    assert spread.signal.item() == pytest.approx(25 - 19 / 4)
    # contrasts: 1·1/2·(3 − 1)² = 2 and 2·2/4·(8 − 2)² = 36, standard deviation √((17² + 17²) / 1)
    assert spread.contrast_std == pytest.approx(17 * math.sqrt(2))
    found = spread.scalars("gradient/loss")
    assert found == pytest.approx(
        {
            "gradient/loss/variance": 4.75,
            "gradient/loss/variance_se": 17 / 4,  # 17·√2 / √2 contrasts, over 4 prompts
            "gradient/loss/signal": 20.25,
            "gradient/loss/snr": 20.25 / 4.75,
            "gradient/loss/noise_scale": 19 / 20.25,  # prompts
        }
    )


def test_the_spread_of_a_ratio_matches_hand_arithmetic():
    # parts of 1, 1 and 2 prompts bring 1, 3 and 8 of the gradient and 1, 2 and 1 of the denominator, so
    # S = 4 and the ratio is 12 / 4 = 3; left over are 1 − 3, 3 − 6 and 8 − 3, a quarter of each
    # tr Σ / N = (4/1·4 + 4/1·9 + 4/2·25) / 16 / (3 − 1) = 102 / 32
    spread = spread_of(of_parts([[1.0], [3.0], [8.0]], [1, 1, 2], [1.0, 2.0, 1.0]))
    assert spread.square.item() == pytest.approx(9)
    assert spread.variance.item() == pytest.approx(102 / 32)
    # ratios before a part: 1 and 4/3; contrasts (3 − 2·1)² / (1 + 2²/1) and (8 − 4/3)² / (2 + 1²/2)
    contrasts = 1 / 5, (20 / 3) ** 2 / 2.5
    assert spread.contrast_std == pytest.approx(abs(contrasts[0] - contrasts[1]) / math.sqrt(2))


def test_the_unit_of_the_shares_does_not_matter():
    found = [PartGradients(), PartGradients()]
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for value, size, share in zip(values, [1, 4, 2, 2, 3], [3.0, 5.0, 1.0, 4.0, 2.0], strict=True):
        found[0].add({"x": share * value}, size, share)
        found[1].add({"x": 7 * share * value}, size, 7 * share)
    first, other = (spread_of(one) for one in found)
    torch.testing.assert_close(first.per_prompt, other.per_prompt, rtol=1e-5, atol=0)
    torch.testing.assert_close(first.square, other.square, rtol=1e-5, atol=0)
    assert first.variance_se == pytest.approx(other.variance_se, rel=1e-5)


def test_a_large_signal_takes_nothing_from_a_small_scatter():
    noise = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    shares = [1.0, 1.5, 0.5, 2.0, 1.0, 3.0]
    plain, shifted = PartGradients(), PartGradients()
    for value, share in zip(noise, shares, strict=True):
        plain.add({"x": value}, 1, share)
        shifted.add({"x": value + 1000 * share}, 1, share)  # the ratio is 1000 larger, the rest the same
    expected = spread_of(plain).per_prompt
    torch.testing.assert_close(spread_of(shifted).per_prompt, expected, rtol=1e-3, atol=0)


def test_blocks_add_up_to_the_whole():
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    whole, blocks = PartGradients(), PartGradients()
    for value in values:
        whole.add({"all": value}, 2)
        blocks.add({"a": value[:2], "b": value[2:]}, 2)
    found, expected = spread_of(blocks).scalars("g"), spread_of(whole).scalars("g")
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["g/a/variance"] + found["g/b/variance"] == pytest.approx(found["g/variance"])
    assert set(found) - set(expected) == {"g/a/variance", "g/a/snr", "g/b/variance", "g/b/snr"}


def test_parts_in_which_nothing_counts_are_left_out():
    expected = spread_of(of_parts([[1.0], [3.0]], [1, 2]))
    found = spread_of(of_parts([[0.0], [1.0], [0.0], [3.0]], [0, 1, 0, 2]))
    assert found.n_parts == expected.n_parts == 2
    assert torch.equal(found.per_prompt, expected.per_prompt)
    assert of_parts([[1.0], [0.0]], [3, 0]).spread() is None
    assert of_parts([[0.0], [0.0]], [0, 0]).spread() is None


def test_two_parts_have_a_variance_and_no_error_of_it():
    found = spread_of(of_parts([[1.0], [3.0]], [1, 1])).scalars("g")
    assert found["g/variance"] == pytest.approx(1.0)
    assert "g/variance_se" not in found


def test_parts_that_agree_leave_out_what_would_divide_by_zero():
    found = spread_of(of_parts([[2.0], [2.0], [2.0]], [1, 1, 1])).scalars("g")
    assert found == {"g/variance": 0.0, "g/signal": 4.0, "g/variance_se": 0.0}


def test_a_signal_below_its_noise_is_negative_and_not_cut_off():
    found = spread_of(of_parts([[1.0], [-1.0]], [1, 1])).scalars("g")
    assert found["g/signal"] == pytest.approx(-1.0)  # 0 − 1
    assert found["g/noise_scale"] == pytest.approx(-2.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_belongs_to_its_layer_or_its_kind_of_module(name: str):
    assert (block_of(name, "layer"), block_of(name, "module")) == NAMES[name]
    assert block_of(name, "all") == "all"


def on_a_rank(fabric: Fabric, *columns: list) -> list[float]:
    mine = slice(fabric.global_rank, None, fabric.world_size)
    spread = spread_of(of_parts(*(column[mine] for column in columns)))
    return [
        float(spread.per_prompt),
        float(spread.square),
        spread.n_prompts,
        spread.n_parts,
        spread.variance_se,
    ]


@pytest.mark.parametrize("shares", [[], [[0.5, 1.0, 4.0, 2.0, 0.3, 0.0, 1.0]]], ids=["of prompts", "own"])
def test_two_ranks_with_parts_of_their_own_equal_one_with_all(shares):
    values = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).tolist()
    columns = values, [1, 2, 3, 1, 2, 0, 1], *shares
    expected = spread_of(of_parts(*columns))
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    per_prompt, square, n_prompts, n_parts, error = fabric.launch(on_a_rank, *columns)
    assert per_prompt == pytest.approx(float(expected.per_prompt), rel=1e-5)
    assert square == pytest.approx(float(expected.square), rel=1e-5)
    assert (n_prompts, n_parts) == (10, 6)
    assert 0 < error < 10 * expected.variance_se
    alone = spread_of(of_parts(*(column[::2] for column in columns)))
    assert float(alone.per_prompt) != pytest.approx(float(expected.per_prompt), rel=1e-2)


VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(0)) + 0.5
SQUARE = float(VALUES.square().sum())


def squares(size: int, n: int = 400) -> torch.Tensor:
    """‖sketch‖² over seeds."""
    return torch.stack([CountSketch(size, seed)("weight", VALUES).square().sum() for seed in range(n)])


@pytest.mark.parametrize("size", [16, 128])
def test_the_square_is_unbiased_and_as_exact_as_promised(size: int):
    found = squares(size)
    promised = SQUARE * math.sqrt(2 / size)
    assert found.mean().item() == pytest.approx(SQUARE, abs=4 * promised / math.sqrt(len(found)))
    # a standard deviation of 400 draws is itself known to some 5 %
    assert 0.75 * promised < found.std().item() < 1.2 * promised


def test_the_comparison_catches_buckets_without_signs():
    unsigned = torch.zeros(16).index_add(0, torch.randint(16, (1000,)), VALUES).square().sum()
    assert unsigned.item() > 5 * SQUARE


def test_a_sketch_is_linear_and_keeps_products_of_the_same_name():
    other = torch.randn(1000, generator=torch.Generator().manual_seed(1)) + 0.5
    one = CountSketch(64)
    torch.testing.assert_close(
        one("weight", VALUES + 2 * other), one("weight", VALUES) + 2 * one("weight", other)
    )
    products = [
        (CountSketch(64, seed)("weight", VALUES) @ CountSketch(64, seed)("weight", other)).item()
        for seed in range(400)
    ]
    expected = float(VALUES @ other)
    error = 4 * math.sqrt(2 / 64) * math.sqrt(SQUARE * float(other.square().sum())) / math.sqrt(400)
    assert sum(products) / 400 == pytest.approx(expected, abs=error)
    assert expected > 2 * error  # so that a mean of 0, which vectors of two names have, is told apart
    apart = [
        (CountSketch(64, seed)("a", VALUES) @ CountSketch(64, seed)("b", other)).item() for seed in range(400)
    ]
    assert sum(apart) / 400 == pytest.approx(0.0, abs=error)


def test_long_vectors_are_sketched_in_chunks(monkeypatch):
    monkeypatch.setattr(covariance, "CHUNK", 300)
    found = squares(64)
    error = 4 * SQUARE * math.sqrt(2 / 64) / math.sqrt(len(found))
    assert found.mean().item() == pytest.approx(SQUARE, abs=error)
