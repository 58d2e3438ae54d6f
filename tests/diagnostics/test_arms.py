import math

import pytest
import torch

from lit_rlkv.diagnostics.arms import arm_statistics, effective_share
from lit_rlkv.diagnostics.scalars import as_floats
from lit_rlkv.objectives import corrections

LOG_RATIO = torch.tensor([[4.0, 1.0], [0.25, math.nan]]).log()
IS_ACTION = torch.tensor([[True, True], [True, False]])


def of_arm(name, log_ratio=LOG_RATIO, response_mask=IS_ACTION):
    prefix = f"kv/arms/{name}/"
    found = as_floats(arm_statistics(log_ratio, response_mask))
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
def test_each_arm_matches_hand_arithmetic(arm, expected):
    assert of_arm(arm) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arm", "weigh"),
    [("tis", corrections.truncated), ("mis", corrections.masked), ("sparse_rl", corrections.sparse_rl)],
)
def test_an_arm_weighs_as_it_does_in_training(arm, weigh):
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


def test_an_arm_that_rejects_all_has_no_sample_left():
    found = of_arm("mis", torch.full((2, 3), 3.0), torch.ones(2, 3, dtype=torch.bool))
    assert found == {"ess": 0.0, "ess_seq": 0.0, "mean_weight": 0.0, "max_weight": 0.0, "rejected": 1.0}


def test_without_mismatch_every_arm_keeps_the_whole_sample():
    found = as_floats(arm_statistics(torch.zeros(4, 5), torch.ones(4, 5, dtype=torch.bool)))
    for name, value in found.items():
        none_lost = name.endswith(("rejected", "clipped"))
        assert value == pytest.approx(0.0 if none_lost else 1.0, abs=1e-6), name


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
