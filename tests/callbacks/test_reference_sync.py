"""The reference that follows the policy, beside TRL's callback."""

import copy

import pytest
import torch

from lit_rlkv.callbacks.reference_sync import ReferenceSync
from tests.hand_built import make_module, make_roles, shift


def weights(roles, role):
    return copy.deepcopy([*roles.backbone(role).parameters()])


def synced(every, alpha, n_iterations):
    """Return the weights of policy and reference after each iteration; the policy moves in every one."""
    roles = make_roles("ppo").double()
    callback = ReferenceSync(every, alpha)
    callback.on_fit_start(None, make_module(roles))
    history = []
    for iteration in range(1, n_iterations + 1):
        shift(roles, seed=iteration)
        callback.on_iteration_end(iteration, n_iterations, {})
        history.append((weights(roles, "policy"), weights(roles, "reference")))
    return history


def is_equal(ours, theirs):
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("every", "alpha"), [(1, 0.6), (3, 0.6), (2, 1), (3, 0.01)])
def test_the_reference_is_that_of_trl_at_every_iteration(every, alpha):
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    reference = make_roles("ppo").double().backbone("reference")
    policy = copy.deepcopy(reference)
    for iteration, (ours, synced_reference) in enumerate(synced(every, alpha, 7), start=1):
        for parameter, value in zip(policy.parameters(), ours, strict=True):
            parameter.data.copy_(value)
        if iteration % every == 0:
            callbacks.SyncRefModelCallback._sync_target_model(policy, reference, alpha)
        assert is_equal(synced_reference, reference.parameters()), iteration


def test_the_comparison_sees_another_interval_and_another_alpha():
    history = synced(3, 0.6, 7)
    for other in (synced(4, 0.6, 7), synced(3, 0.4, 7)):
        same = [is_equal(ours[1], theirs[1]) for ours, theirs in zip(history, other, strict=True)]
        assert same == [True, True, False, False, False, False, False]


def test_the_policy_trains_on_after_a_sync_and_the_reference_does_not():
    roles = make_roles("ppo")
    callback = ReferenceSync(1, 1.0)
    callback.on_fit_start(None, make_module(roles))
    policy, reference = (roles.backbone(role).parameters for role in ("policy", "reference"))
    shift(roles)
    assert not is_equal(policy(), reference())
    callback.on_iteration_end(1, 2, {})
    assert is_equal(policy(), reference())
    assert roles.reference_is_synced
    assert not any(parameter.requires_grad for parameter in reference())
    shift(roles)
    assert not is_equal(policy(), reference())
