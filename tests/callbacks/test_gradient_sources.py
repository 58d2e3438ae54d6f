from dataclasses import replace
from functools import cache

import pytest
import torch

from lit_rlkv.callbacks.gradient_sources import GradientSources, rms_advantage
from lit_rlkv.callbacks.gradient_variance import GradientVariance
from lit_rlkv.config.schema import KLConfig
from lit_rlkv.experience.advantages import GroupAdvantage
from tests.callbacks.gradients import make_run, measured
from tests.hand_built import (
    ARMS,
)


def test_the_constant_advantage_is_the_root_mean_square_over_all_parts_by_their_shares():
    run = make_run(advantage=GroupAdvantage("dr_grpo"))
    parts = list(run.data.splitter.parts(run.experience, 3))  # of 3, 3 and 2 prompts
    rewards = run.experience.rewards.total.view(8, 4)
    squares = (rewards - rewards.mean(dim=1, keepdim=True)).square()
    assert float(rms_advantage(parts)) == pytest.approx(float(squares.mean().sqrt()), rel=1e-5)
    of_parts = torch.stack([one.mean() for one in squares.split([3, 3, 2])])
    assert float(of_parts.mean().sqrt()) != pytest.approx(float(squares.mean().sqrt()), rel=1e-3)


SOURCES = ("sampling", "rewards", "reweighting")


@cache
def sources(arm: str, algorithm: str = "grpo") -> dict[str, float]:
    run = make_run(algorithm, arm)
    if algorithm == "grpo":
        assert run.experience.rewards.total.view(8, 4).std(dim=1).max() > 0
    return measured(GradientSources(every=1), run)


@pytest.mark.parametrize("arm", ARMS)
def test_the_sources_add_up_to_the_variance_of_the_policys_term(arm: str):
    found = sources(arm)
    whole = measured(GradientVariance(every=1, terms=["policy"]), make_run(arm=arm))
    assert found["gradient/sources/total"] == pytest.approx(whole["gradient/policy/variance"], rel=1e-4)
    parts = [found[f"gradient/sources/{name}"] for name in SOURCES]
    assert sum(parts) == pytest.approx(found["gradient/sources/total"])
    is_weighted = arm in ("tis", "mis", "sparse_rl")
    assert (abs(parts[2]) > 1e-4 * sum(parts)) == is_weighted


def test_reweighting_is_the_variance_beyond_that_without_weights():
    naive = sources("naive")
    for arm in ("tis", "mis", "sparse_rl"):
        found = sources(arm)
        for name in ("sampling", "rewards"):
            assert found[f"gradient/sources/{name}"] == pytest.approx(naive[f"gradient/sources/{name}"])
        gained = found["gradient/sources/total"] - naive["gradient/sources/total"]
        assert found["gradient/sources/reweighting"] == pytest.approx(gained, rel=1e-3)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_counterfactual_sees_the_reference_densely_too(place: str):
    kl = KLConfig(weight=0.3, place=place)
    algorithm = "online_dpo" if place == "loss" else "grpo"
    options = {"algorithm": algorithm} | ({} if place == "loss" else {"kl": kl})
    replayed = make_run(**options)
    found = measured(GradientSources(every=1, counterfactual="tis"), replayed)
    expected = measured(GradientSources(every=1), make_run(arm="tis", **options))
    for name in (*SOURCES, "total"):
        counterfactual, its = found[f"gradient/counterfactual/{name}"], expected[f"gradient/sources/{name}"]
        assert counterfactual == pytest.approx(its, rel=1e-3, abs=1e-7), name
    assert found["gradient/sources/total"] != pytest.approx(expected["gradient/sources/total"], rel=1e-2)


@pytest.mark.parametrize("correction", ["tis", "mis", "sparse_rl"])
def test_the_counterfactual_of_replay_equals_training_with_that_correction(correction: str):
    found = measured(GradientSources(every=1, counterfactual=correction), make_run())
    expected = sources(correction)
    for name in (*SOURCES, "total"):
        counterfactual = found[f"gradient/counterfactual/{name}"]
        assert counterfactual == pytest.approx(expected[f"gradient/sources/{name}"], rel=1e-3), name
    assert found["gradient/sources/reweighting"] == 0
    dense = measured(GradientSources(every=1, counterfactual=correction), make_run(arm="naive"))
    assert not any("counterfactual" in name for name in dense)  # it has no other view to ask about


def test_sampling_is_what_constant_advantages_give():
    run = make_run(advantage=GroupAdvantage("dr_grpo"))
    found = measured(GradientSources(every=1), run)["gradient/sources/sampling"]
    rewards = run.experience.rewards.total.view(8, 4)
    constant = (rewards - rewards.mean(dim=1, keepdim=True)).square().mean().sqrt()

    class Constant(GroupAdvantage):
        def compute(self, experience):
            credit = super().compute(experience)
            value = torch.where(experience.rollout.response_mask, constant, 0.0)
            return replace(credit, advantages=value)

    run.data.splitter.advantage = Constant("dr_grpo")
    expected = measured(GradientVariance(every=1, terms=["policy"]), run)["gradient/policy/variance"]
    assert found == pytest.approx(expected, rel=1e-4)


def test_preference_pairs_leave_nothing_to_rewards():
    found = sources("tis", "online_dpo")
    assert found["gradient/sources/rewards"] == 0
    assert abs(found["gradient/sources/reweighting"]) > 1e-6
    assert sources("shadow", "online_dpo")["gradient/sources/reweighting"] == 0
