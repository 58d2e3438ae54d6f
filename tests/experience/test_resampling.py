"""Groups of equal rewards give way to groups of new prompts, and nothing else changes."""

from dataclasses import replace

import pytest
import torch

from lit_rlkv.callbacks.rollout_statistics import rollout_statistics
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.group_baselines import is_informative
from lit_rlkv.experience.resampling import replace_equal_groups
from lit_rlkv.models import replay_logps
from lit_rlkv.models.hydra import acting_as
from tests.hand_built import ARMS, DigitsAreGood, make_datamodule, make_roles, shift, tokens_of


def is_right(completion: str) -> bool:
    return completion[:1] in ("1", "2", "3")


OPTIONS = {"rollout": {"max_new_tokens": 10, "top_p": 0.9}}


class LengthsDiffer(DigitsAreGood):
    """Prompts of other lengths in each round, and rewards that are equal in some groups."""

    def score(self, problem, completion):
        return float(is_right(completion))

    def sample(self, rng):
        return DigitsAreGood(n_terms=rng.choice([2, 3, 4])).sample(rng)


def collected(roles=None, **options) -> Experience:
    task = LengthsDiffer(n_terms=3)
    return make_datamodule(roles or make_roles(), task=task, **{**OPTIONS, **options}).collect()


def is_useful(experience: Experience) -> list[bool]:
    return is_informative(experience.rewards.total.view(-1, experience.group_size)).tolist()


def groups_of(experience: Experience) -> list[tuple]:
    tokens, size = tokens_of(experience.rollout), experience.group_size
    return [tuple(tokens[row : row + size]) for row in range(0, len(tokens), size)]


def test_only_groups_of_equal_rewards_are_replaced_and_by_useful_ones():
    roles = make_roles()
    first, resampled = collected(roles), collected(roles, resample=8)
    assert (first.n_rounds, rollout_statistics(first).get("rollout/rounds")) == (None, None)
    useful = is_useful(first)
    assert not all(useful)
    assert any(useful)
    assert sum(is_useful(resampled)) > sum(useful)
    assert rollout_statistics(resampled)["rollout/rounds"] == resampled.n_rounds > 1
    before, after = groups_of(first), groups_of(resampled)
    for place, kept in enumerate(useful):
        if kept:
            assert after[place] == before[place]
        elif is_useful(resampled)[place]:
            assert after[place] != before[place]
    for row, problem in enumerate(resampled.problems):
        assert is_right(resampled.completions[row]) == bool(resampled.rewards.total[row])
        assert problem == resampled.problems[row // 4 * 4]


def test_rounds_end_with_the_last_equal_group_and_are_bounded():
    roles = make_roles()
    rounds = [collected(roles, resample=n).n_rounds for n in (1, 3, 30)]
    assert rounds[0] == 2
    assert all(n is not None and n <= 1 + most for n, most in zip(rounds, (1, 3, 30), strict=True))
    assert all(is_useful(collected(roles, resample=30)))


@pytest.mark.parametrize("arm", ["shadow", "sparse_rl"])
def test_what_is_replaced_is_replayed_as_it_was_sampled(arm: str):
    roles = shift(make_roles(), std=0.1)
    data = make_datamodule(roles, correction=ARMS[arm], task=LengthsDiffer(n_terms=3), resample=8, **OPTIONS)
    experience = data.collect()
    rollout = experience.rollout
    with acting_as(roles, "policy") as backbone, torch.no_grad():
        logps = replay_logps(backbone, rollout)
    assert experience.n_rounds is not None
    assert experience.n_rounds > 1
    assert (logps - rollout.rollout_logps).abs().max() < 1e-4
    # Responses begin in one column.
    first = int(rollout.response_mask.any(dim=0).int().argmax())
    assert rollout.response_mask[:, first].all()
    weights = experience.weights.weight[experience.weights.is_counted]
    if arm == "sparse_rl":
        assert float(weights.mean()) == pytest.approx(1.0, abs=1e-5)  # over the batch as it is
    next(iter(data.splitter.minibatches(experience)))


def test_the_first_part_may_be_the_longer_or_the_shorter_one():
    roles = make_roles()
    parts = [
        make_datamodule(roles, task=DigitsAreGood(n_terms=n), seed=n, **OPTIONS).collect() for n in (2, 5)
    ]
    for first, more in (parts, parts[::-1]):
        dull = replace(first, rewards=replace(first.rewards, total=torch.zeros(16)))
        lively = replace(more, rewards=replace(more.rewards, total=torch.arange(16.0)))
        assert groups_of(replace_equal_groups(dull, lively, 0)) == groups_of(more)
        assert groups_of(replace_equal_groups(lively, dull, 0)) == groups_of(more)


def test_a_resumed_run_takes_the_prompts_after_those_of_all_rounds():
    roles = make_roles()
    data, again = (
        make_datamodule(roles, task=LengthsDiffer(n_terms=3), resample=3, **OPTIONS) for _ in range(2)
    )
    data.collect()
    data.iteration += 1
    again.load_state_dict(data.state_dict())
    assert groups_of(again.collect()) == groups_of(data.collect())


def test_without_a_scored_policy_the_old_log_probs_stay_those_of_the_sampler():
    found = collected(resample=8)
    assert found.n_rounds > 1
    assert found.old_logps is found.rollout.rollout_logps
