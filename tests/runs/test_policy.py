"""The layers of a model that are sharded."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_rlkv.runs.policy import layers_in_order
from tests.hand_built import make_model


class Twice(GradientCheckpointingLayer):
    """A layer that is called before another one, and again with it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_layers_stand_in_the_order_in_which_text_goes_through_them():
    model = make_model()
    layers = list(model.model.layers)
    assert layers_in_order(model) == layers
    model.model.layers = nn.ModuleList(reversed(layers))
    assert layers_in_order(model) == layers[::-1]


def test_a_layer_that_text_does_not_go_through_is_none_of_them():
    model = make_model()
    model.model.vision = Twice(nn.Identity())
    assert layers_in_order(model) == list(model.model.layers)


def test_a_layer_within_a_layer_is_called_as_well():
    model = make_model()
    inner = model.model.layers[0]
    model.model.layers[0] = Twice(inner)
    assert layers_in_order(model)[:2] == [model.model.layers[0], inner]
