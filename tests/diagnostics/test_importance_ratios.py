import math

import pytest
import torch

from lit_rlkv.diagnostics import as_floats
from lit_rlkv.diagnostics.importance_ratios import (
    correction_statistics,
    dense_mismatch,
    effective_share,
    importance_ratios,
    off_policy,
    rejections,
    rollout_correction,
    untruncated_ratios,
)
from lit_rlkv.objectives import corrections

L = math.log(2)
SAMPLER = torch.tensor([[-L, -L], [-L, math.nan]])
LEARNER = torch.tensor([[0.0, -L], [-3 * L, math.nan]])
RESPONSE_MASK = torch.tensor([[True, True], [True, False]])
"""Probabilities 1/2, 1/2 and 1/2 of the sampler, 1, 1/2 and 1/8 of the learner: ratios 2, 1 and 1/4."""


def test_divergences_match_hand_arithmetic():
    assert as_floats(off_policy(LEARNER, SAMPLER, RESPONSE_MASK)) == pytest.approx(
        {
            "kl": L / 3,  # (-L + 0 + 2 L) / 3
            "k3_kl": (0.25 + L) / 3,  # ((2 - L - 1) + 0 + (1/4 + 2 L - 1)) / 3
            "chi2_token": 0.6875,  # (4 + 1 + 1/16) / 3 - 1
            "chi2_seq": 1.03125,  # (2^2 + (1/4)^2) / 2 - 1
            "training_ppl": (2**0.5 + 8) / 2,  # mean -log p: L / 2 and 3 L
            "training_log_ppl": 1.75 * L,
            "rollout_ppl": 2.0,  # L and L
            "rollout_log_ppl": L,
            "log_ppl_diff": 0.75 * L,  # -L / 2 and 2 L
            "log_ppl_abs_diff": 1.25 * L,
            "log_ppl_diff_max": 2 * L,
            "log_ppl_diff_min": -L / 2,
            "ppl_ratio": (2**-0.5 + 4) / 2,
        },
        abs=1e-6,
    )


def test_ratios_match_hand_arithmetic():
    log_ratio = torch.tensor([[4.0, 1.0], [0.25, math.nan]]).log()
    # the weights are 2, 1 and 1/4: mean 13/12, mean square 27/16; means of the rows 3/2 and 1/4
    assert as_floats(importance_ratios(log_ratio, RESPONSE_MASK)) == pytest.approx(
        {
            "rollout_is_mean": 13 / 12,
            "rollout_is_std": (27 / 16 - 169 / 144) ** 0.5,
            "rollout_is_max": 2.0,
            "rollout_is_min": 0.25,
            "rollout_is_eff_sample_size": (169 / 144) / (27 / 16),
            "rollout_is_ratio_fraction_high": 1 / 3,
            "rollout_is_ratio_fraction_low": 1 / 3,
            "rollout_is_seq_mean": 0.875,
            "rollout_is_seq_std": 1.25 / 2**0.5,  # of two numbers 1.25 apart
            "rollout_is_seq_max": 1.5,
            "rollout_is_seq_min": 0.25,
            "rollout_is_seq_max_deviation": 0.75,
            "rollout_is_seq_fraction_high": 0.5,  # of the mean ratio, 5/2
            "rollout_is_seq_fraction_low": 0.5,
        },
        abs=1e-6,
    )


def test_ratios_before_truncation_match_hand_arithmetic():
    log_ratio = torch.tensor([[4.0, 1.0], [0.25, math.nan]]).log()
    assert as_floats(untruncated_ratios(log_ratio, RESPONSE_MASK)) == pytest.approx(
        {
            "kv/ratio_mean": 1.75,
            "kv/ratio_max": 4.0,
            "kv/ratio_min": 0.25,
            "kv/ratio_seq_mean": 1.375,
            "kv/ratio_seq_max": 2.5,
            "kv/ratio_seq_min": 0.25,
        },
        abs=1e-6,
    )


def test_ratios_are_bounded_before_they_are_squared():
    log_ratio = torch.tensor([[60.0]])
    response_mask = torch.ones(1, 1, dtype=torch.bool)
    assert untruncated_ratios(log_ratio, response_mask)["kv/ratio_max"] == pytest.approx(math.exp(20))
    assert importance_ratios(log_ratio, response_mask)["rollout_is_max"] == 2.0
    found = off_policy(log_ratio, torch.zeros(1, 1), response_mask)
    assert found["chi2_seq"].item() == pytest.approx(math.exp(40), rel=1e-5)
    assert not math.isfinite(torch.tensor(60.0).exp().square())  # what it would have been


def test_rejected_and_vetoed_shares_match_hand_arithmetic():
    weight = torch.tensor([[0.0, 1.0], [0.5, 0.0]])  # the last column of row 2 is padding
    log_ratio = torch.tensor([[0.0, -9.0], [-10.0, math.nan]])  # log 1e-4 = -9.2
    assert as_floats(rejections(log_ratio, weight, RESPONSE_MASK)) == pytest.approx(
        {
            "rollout_rs_masked_fraction": 1 / 3,
            "rollout_rs_seq_masked_fraction": 1 / 2,
            "rollout_is_catastrophic_token_fraction": 1 / 3,
            "rollout_is_veto_fraction": 1 / 2,
        }
    )


def test_a_learner_that_sees_what_the_sampler_saw_has_no_mismatch():
    found = as_floats(rollout_correction(SAMPLER, SAMPLER, torch.ones(2, 2), RESPONSE_MASK))
    ones = {"ppl_ratio", "rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size"}
    ones |= {"rollout_is_seq_mean", "rollout_is_seq_max", "rollout_is_seq_min"}
    perplexities = {"training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl"}
    for name, value in found.items():
        if name.startswith("kv/ratio_"):
            assert value == 1.0, name
            continue
        assert name.startswith("rollout_corr/")
        if (bare := name.removeprefix("rollout_corr/")) not in perplexities:
            assert value == (1.0 if bare in ones else 0.0), name


def test_the_dense_learner_has_the_same_numbers_under_names_of_its_own():
    found = as_floats(dense_mismatch(LEARNER, SAMPLER, RESPONSE_MASK))
    expected = as_floats(off_policy(LEARNER, SAMPLER, RESPONSE_MASK))
    assert found.pop("kv/dense_log_ratio_p99") == pytest.approx(2 * L)  # the third of L, 0 and 2 L
    assert found == {
        f"kv/dense_{name}": value for name, value in expected.items() if not name.startswith("rollout")
    }


def test_the_tail_is_the_value_that_all_but_a_hundredth_stay_below():
    log_ratio = -torch.arange(200.0)[None]
    found = dense_mismatch(log_ratio, torch.zeros(1, 200), torch.ones(1, 200, dtype=torch.bool))
    assert found["kv/dense_log_ratio_p99"] == 197.0  # 198 of the 200 are 0 to 197


LOG_RATIO = torch.tensor([[4.0, 1.0], [0.25, math.nan]]).log()


def of_arm(name, log_ratio=LOG_RATIO, response_mask=RESPONSE_MASK):
    prefix = f"kv/arms/{name}/"
    found = as_floats(correction_statistics(log_ratio, response_mask))
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        # weights 4, 1 and 1/4: sum 21/4, squares 273/16; rows 5/2 and 1/4
        (
            "token_ratio",
            {
                "ess": (21 / 4) ** 2 / (3 * 273 / 16),
                "ess_seq": (11 / 4) ** 2 / (2 * 101 / 16),
                "mean_weight": 7 / 4,
                "max_weight": 4.0,
            },
        ),
        # the products 4 and 1/4 at each of their actions
        (
            "sequence_ratio",
            {
                "ess": (33 / 4) ** 2 / (3 * 513 / 16),
                "ess_seq": (17 / 4) ** 2 / (2 * 257 / 16),
                "mean_weight": 11 / 4,
                "max_weight": 4.0,
            },
        ),
        # 2, 1 and 1/4; rows 3/2 and 1/4
        (
            "tis",
            {
                "ess": (13 / 4) ** 2 / (3 * 81 / 16),
                "ess_seq": (7 / 4) ** 2 / (2 * 37 / 16),
                "mean_weight": 13 / 12,
                "max_weight": 2.0,
                "clipped": 1 / 3,
            },
        ),
        # 0, 1 and 0; rows 1/2 and 0
        (
            "mis",
            {"ess": 1 / 3, "ess_seq": 1 / 2, "mean_weight": 1 / 3, "max_weight": 1.0, "rejected": 2 / 3},
        ),
        (
            "sparse_rl",
            {"ess": 1 / 3, "ess_seq": 1 / 2, "mean_weight": 1 / 3, "max_weight": 1.0, "rejected": 2 / 3},
        ),
    ],
)
def test_each_correction_matches_hand_arithmetic(arm, expected):
    assert of_arm(arm) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arm", "weigh"),
    [("tis", corrections.truncated), ("mis", corrections.masked), ("sparse_rl", corrections.sparse_rl)],
)
def test_correction_weights_equal_those_of_training(arm, weigh):
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(16, 30, generator=generator) * 0.8
    response_mask = torch.rand(16, 30, generator=generator) < 0.7
    weight = weigh(log_ratio, response_mask).weight[response_mask].double()
    found = of_arm(arm, log_ratio, response_mask)
    assert found["ess"] == pytest.approx(float(weight.sum() ** 2 / weight.square().sum() / len(weight)))
    assert found["mean_weight"] == pytest.approx(float(weight.mean()))
    if "rejected" in found:
        assert found["rejected"] == pytest.approx(float((weight == 0).double().mean()))
    ratio = log_ratio[response_mask].double().exp()
    plain = float(ratio.sum() ** 2 / ratio.square().sum() / len(ratio))
    assert abs(found["ess"] - plain) > 1e-2  # the untruncated ratio is another arm
    assert of_arm("token_ratio", log_ratio, response_mask)["ess"] == pytest.approx(plain)


def test_a_vetoed_sequence_is_rejected_whole_by_sparse_rl_alone():
    log_ratio = torch.tensor([[0.0, -10.0, 0.0], [0.0, 0.0, 0.0]])
    response_mask = torch.ones(2, 3, dtype=torch.bool)
    assert of_arm("sparse_rl", log_ratio, response_mask)["rejected"] == pytest.approx(3 / 6)
    assert of_arm("mis", log_ratio, response_mask)["rejected"] == pytest.approx(1 / 6)


def test_a_correction_that_rejects_everything_has_no_effective_samples():
    found = of_arm("mis", torch.full((2, 3), 3.0), torch.ones(2, 3, dtype=torch.bool))
    assert found == {"ess": 0.0, "ess_seq": 0.0, "mean_weight": 0.0, "max_weight": 0.0, "rejected": 1.0}


def test_products_beyond_the_range_of_floats_are_still_compared():
    # two responses whose weights are e^-500 and e^-501: (1 + 1/e)^2 / (2 (1 + 1/e^2))
    log_ratio = torch.tensor([[-250.0, -250.0], [-250.0, -251.0]])
    response_mask = torch.ones(2, 2, dtype=torch.bool)
    expected = (1 + math.exp(-1)) ** 2 / (2 * (1 + math.exp(-2)))
    assert of_arm("sequence_ratio", log_ratio, response_mask)["ess_seq"] == pytest.approx(expected, rel=1e-4)
    # kept within e^-20, both would weigh the same and nothing would seem lost
    assert expected < 0.83
    assert effective_share(log_ratio.sum(dim=1).clamp(min=-20.0)) == 1.0


def test_one_heavy_weight_is_a_sample_of_one():
    log_weight = torch.tensor([30.0, 0.0, 0.0, 0.0])
    assert effective_share(log_weight) == pytest.approx(0.25)
    assert effective_share(torch.stack([log_weight, torch.zeros(4)])).tolist() == pytest.approx([0.25, 1.0])
