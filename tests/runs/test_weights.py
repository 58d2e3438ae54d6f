"""Parameters of checkpoints: what is saved, and copied back."""

import pytest
import torch
from torch import nn

from lit_rlkv.runs.checkpoint import load_reference, load_trainable, reference_weights
from tests.hand_built import make_roles, shift


def test_parameters_of_another_model_are_refused():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="1 differ, such as bias; give the roles"):
        load_trainable(module, {"weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"weight has shape \(3, 2\) .* give the model and the roles\.rank"):
        load_trainable(module, {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})


def test_the_reference_is_saved_once_it_is_synced_and_loaded_where_there_is_one():
    roles = make_roles("ppo")
    assert reference_weights(roles) == {}
    load_reference(roles, {})
    assert not roles.reference_is_synced
    weights = dict(shift(make_roles("ppo")).backbone("policy").named_parameters())
    load_reference(roles, weights)
    found = reference_weights(roles)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    alone = make_roles("ppo", needed=("policy",))
    load_reference(alone, weights)
    assert not alone.reference_is_synced
    with pytest.raises(ValueError, match=r"1 differ, such as extra"):
        load_reference(roles, weights | {"extra": torch.zeros(1)})
