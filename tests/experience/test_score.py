"""Scores of the roles, by shared and by single forwards."""

from functools import cache

import pytest
import torch
from torch import Tensor

from lit_rlkv.experience.score import score_rollout
from lit_rlkv.kernels.quantization import record_bytes
from lit_rlkv.models.backbone import hidden_states, token_positions
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.layouts import LAYOUTS, ROLES
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.models.replay import replay_logps, response_hidden
from lit_rlkv.types import Codes, Rollout
from tests.hand_built import make_datamodule, make_roles, replayed, shift

TEMPERATURE = 0.7
VIEWS = {
    "shadow": dict.fromkeys(ROLES, True),
    "dense": dict.fromkeys(ROLES, False),
    "as a replaying learner asks": {"reference": True, "reward": False, "value": True},
    "as a dense learner asks": {"policy": False, "reference": False, "reward": False, "value": True},
}


@cache
def roles_of(layout: str) -> Roles:
    """Every role says something else: adapters or backbones have moved, and so has the value head."""
    roles = shift(make_roles(layout, ROLES))
    roles.head("value").linear.weight.data.mul_(0.5)
    return roles


@cache
def rollout() -> Rollout:
    """Five responses, one of which ended early."""
    whole = make_datamodule(make_roles()).collect().rollout
    return whole.rows(slice(3, 8))


def alone(roles: Roles, role: str, shadow: bool) -> Tensor:
    """Return the scores of one role alone."""
    read, record = rollout(), replayed(rollout(), shadow=shadow)
    with torch.no_grad(), acting_as(roles, role) as backbone:
        if role in ("policy", "reference"):
            return replay_logps(backbone, read, shadow=shadow, temperature=TEMPERATURE)
        if role == "value":
            values = roles.head("value")(response_hidden(backbone, read, shadow=shadow))
            return torch.zeros(read.input_ids.shape).masked_scatter(read.response_mask, values)
        hidden = hidden_states(backbone, read.input_ids, token_positions(read.attention_mask), record=record)
    rewards = []
    for row, attention_mask in enumerate(read.attention_mask):
        last = int(attention_mask.nonzero().max())
        rewards.append(roles.head("reward")(hidden[row, last]).detach())
    return torch.stack(rewards)


def scores(layout: str, views: dict[str, bool], **options) -> dict[str, Tensor]:
    return score_rollout(roles_of(layout), rollout(), views, temperature=TEMPERATURE, **options)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.parametrize("tokens_per_pass", [1, 3 * 16, TOKENS_PER_PASS])
@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_one_role_at_a_time(layout, views, tokens_per_pass):
    found = scores(layout, VIEWS[views], tokens_per_pass=tokens_per_pass)
    assert found.keys() == VIEWS[views].keys()
    for role, shadow in VIEWS[views].items():
        assert difference(found[role], alone(roles_of(layout), role, shadow)) < 1e-5, role


def test_only_views_of_the_sampler_are_rounded():
    *rows, n_columns = rollout().evicted_at.shape
    record = torch.zeros(*rows, 2 * record_bytes(8, "int4", 64), n_columns, dtype=torch.uint8)
    rounded = rollout().with_record(codes=Codes("int4", 64, record))
    views = VIEWS["as a replaying learner asks"] | {"policy": True}
    found = score_rollout(roles_of("hydra"), rounded, views, temperature=TEMPERATURE)
    plain = score_rollout(roles_of("hydra"), rollout(), views, temperature=TEMPERATURE)
    with torch.no_grad(), acting_as(roles_of("hydra"), "policy") as backbone:
        alone = replay_logps(backbone, rounded, temperature=TEMPERATURE)
    assert difference(found["policy"], alone) < 1e-5
    for role, shadow in views.items():
        change = difference(found[role], plain[role])
        assert change > 1e-4 if shadow else change < 1e-6, role


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_comparison_catches_a_wrong_view_a_wrong_role_and_a_wrong_temperature(layout: str):
    found, dense = scores(layout, VIEWS["shadow"]), scores(layout, VIEWS["dense"])
    for role in ROLES:
        assert difference(found[role], alone(roles_of(layout), role, False)) > 1e-2
        assert difference(dense[role], alone(roles_of(layout), role, True)) > 1e-2
    assert difference(found["policy"], found["reference"]) > 1e-2
    hot = score_rollout(roles_of(layout), rollout(), VIEWS["shadow"], temperature=1.0)
    assert difference(hot["policy"], found["policy"]) > 1e-2
    assert torch.equal(hot["value"], found["value"])


@pytest.mark.parametrize(
    ("layout", "views", "n_forwards"),
    [
        # reference and reward under one view are one forward, and the critic's adapter another
        ("hydra", {"reference": True, "reward": True}, 1),
        ("hydra", {"reference": True, "reward": True, "value": True}, 2),
        ("j_hydra", {"reference": True, "reward": True, "value": True}, 2),
        # two views of the same role are two forwards
        ("hydra", VIEWS["as a replaying learner asks"], 3),
        # policy and critic are one where they share their adapter
        ("hydra", VIEWS["dense"], 3),
        ("j_hydra", VIEWS["dense"], 2),
        # only passes of the same backbone can be shared
        ("dynamic_lora", VIEWS["dense"], 4),
        ("dynamic_lora", {"reference": True, "reward": True, "value": True}, 3),
        ("lora_ppo", VIEWS["dense"], 4),
        ("ppo", VIEWS["dense"], 4),
        ("hydra", {}, 0),
    ],
)
def test_forwards_are_as_few_as_give_the_same_numbers(layout, views, n_forwards):
    assert len(shapes_of_forwards(layout, views)) == n_forwards
    # five responses, the three longest ones first
    limit = 3 * int(rollout().attention_mask.sum(dim=1).max())
    parts = shapes_of_forwards(layout, views, tokens_per_pass=limit)
    assert len(parts) == 2 * n_forwards
    assert all(n_rows * n_columns <= limit for n_rows, n_columns in parts)


def shapes_of_forwards(layout: str, views: dict[str, bool], **options) -> list[tuple[int, int]]:
    """Return (rows, columns) of the forwards that score the rollout."""
    roles, shapes = roles_of(layout), []
    handles = [
        roles.named_backbone(name).base_model.register_forward_pre_hook(
            # of the table, because the tokens may be a flat sequence
            lambda module, args, kwargs: shapes.append((*kwargs["replay"].record.evicted_at.shape[::3],)),
            with_kwargs=True,
        )
        for name in roles.backbones
    ]
    scores(layout, views, **options)
    for handle in handles:
        handle.remove()
    return shapes


def test_without_roles_to_score_nothing_is_packed(monkeypatch):
    monkeypatch.setattr("lit_rlkv.experience.score.passes", None)
    done = []
    assert scores("hydra", {}, on_progress=done.append) == {}
    assert sum(done) == len(rollout().input_ids)


def test_nothing_is_said_of_what_was_not_sampled_and_nothing_carries_a_gradient():
    found = scores("hydra", VIEWS["shadow"])
    for role in ("policy", "reference", "value"):
        assert (found[role][~rollout().response_mask] == 0).all()
        assert (found[role][rollout().response_mask] != 0).all()
    assert not any(value.requires_grad for value in found.values())
    assert all(value.dtype == torch.float32 for value in found.values())
