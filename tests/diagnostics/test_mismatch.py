import math

import pytest
import torch

from lit_rlkv.diagnostics.mismatch import (
    dense_mismatch,
    importance_ratios,
    off_policy,
    rejections,
    rollout_correction,
)
from lit_rlkv.diagnostics.scalars import as_floats

L = math.log(2)
SAMPLER = torch.tensor([[-L, -L], [-L, math.nan]])
LEARNER = torch.tensor([[0.0, -L], [-3 * L, math.nan]])
IS_ACTION = torch.tensor([[True, True], [True, False]])
"""Probabilities 1/2, 1/2 and 1/2 of the sampler, 1, 1/2 and 1/8 of the learner: ratios 2, 1 and 1/4."""


def test_divergences_match_hand_arithmetic():
    assert as_floats(off_policy(LEARNER, SAMPLER, IS_ACTION)) == pytest.approx(
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


def test_the_divergence_of_learner_and_sampler_is_not_that_of_sampler_and_learner():
    there, back = (
        off_policy(*pair, IS_ACTION)["kl"].item() for pair in ((LEARNER, SAMPLER), (SAMPLER, LEARNER))
    )
    assert there == pytest.approx(-back)
    assert abs(there) > 0.1


def test_ratios_match_hand_arithmetic():
    log_ratio = torch.tensor([[4.0, 1.0], [0.25, math.nan]]).log()
    # within [1/2, 2] the ratios are 2, 1 and 1/2: mean 7/6, mean square 7/4; means of the rows 5/2 and 1/4
    assert as_floats(importance_ratios(log_ratio, IS_ACTION)) == pytest.approx(
        {
            "rollout_is_mean": 1.75,
            "rollout_is_std": (7 / 4 - 49 / 36) ** 0.5,
            "rollout_is_max": 4.0,
            "rollout_is_min": 0.25,
            "rollout_is_eff_sample_size": (49 / 36) / (7 / 4),
            "rollout_is_ratio_fraction_high": 1 / 3,
            "rollout_is_ratio_fraction_low": 1 / 3,
            "rollout_is_seq_mean": 1.375,
            "rollout_is_seq_std": 2.25 / 2**0.5,  # of two numbers 2.25 apart
            "rollout_is_seq_max": 2.5,
            "rollout_is_seq_min": 0.25,
            "rollout_is_seq_max_deviation": 1.5,
            "rollout_is_seq_fraction_high": 0.5,
            "rollout_is_seq_fraction_low": 0.5,
        },
        abs=1e-6,
    )


def test_ratios_are_bounded_before_they_are_squared():
    log_ratio = torch.tensor([[60.0]])
    response_mask = torch.ones(1, 1, dtype=torch.bool)
    assert importance_ratios(log_ratio, response_mask)["rollout_is_max"] == pytest.approx(math.exp(20))
    found = off_policy(log_ratio, torch.zeros(1, 1), response_mask)
    assert found["chi2_seq"].item() == pytest.approx(math.exp(40), rel=1e-5)
    assert not math.isfinite(torch.tensor(60.0).exp().square())  # what it would have been


def test_rejected_and_vetoed_shares_match_hand_arithmetic():
    weight = torch.tensor([[0.0, 1.0], [0.5, 0.0]])  # the last column of row 2 is padding
    log_ratio = torch.tensor([[0.0, -9.0], [-10.0, math.nan]])  # log 1e-4 = -9.2
    assert as_floats(rejections(log_ratio, weight, IS_ACTION)) == pytest.approx(
        {
            "rollout_rs_masked_fraction": 1 / 3,
            "rollout_rs_seq_masked_fraction": 1 / 2,
            "rollout_is_catastrophic_token_fraction": 1 / 3,
            "rollout_is_veto_fraction": 1 / 2,
        }
    )


def test_a_learner_that_sees_what_the_sampler_saw_has_no_mismatch():
    found = as_floats(rollout_correction(SAMPLER, SAMPLER, torch.ones(2, 2), IS_ACTION))
    ones = {"ppl_ratio", "rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size"}
    ones |= {"rollout_is_seq_mean", "rollout_is_seq_max", "rollout_is_seq_min"}
    perplexities = {"training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl"}
    for name, value in found.items():
        assert name.startswith("rollout_corr/")
        if (bare := name.removeprefix("rollout_corr/")) not in perplexities:
            assert value == (1.0 if bare in ones else 0.0), name


def test_the_dense_learner_has_the_same_numbers_under_names_of_its_own():
    found = as_floats(dense_mismatch(LEARNER, SAMPLER, IS_ACTION))
    expected = as_floats(off_policy(LEARNER, SAMPLER, IS_ACTION))
    assert found.pop("kv/dense_log_ratio_p99") == pytest.approx(2 * L)  # the third of L, 0 and 2 L
    assert found == {
        f"kv/dense_{name}": value for name, value in expected.items() if not name.startswith("rollout")
    }


def test_the_tail_is_the_value_that_all_but_a_hundredth_stay_below():
    log_ratio = -torch.arange(200.0)[None]
    found = dense_mismatch(log_ratio, torch.zeros(1, 200), torch.ones(1, 200, dtype=torch.bool))
    assert found["kv/dense_log_ratio_p99"] == 197.0  # 198 of the 200 are 0 to 197
