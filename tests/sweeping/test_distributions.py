"""How the parameters of a sweep file are read."""

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.distributions import KINDS, parse_parameters


def test_nested_names_are_joined_by_dots_and_constants_are_apart():
    varied, constants = parse_parameters(
        {
            "cache": {"parameters": {"budget": {"values": [12, 16]}, "policy": {"value": "h2o"}}},
            "stages": {"value": ["sft", "rl"]},
        }
    )
    assert [found.name for found in varied] == ["cache.budget"]
    assert constants == {"cache.policy": "h2o", "stages": ["sft", "rl"]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"distribution": "log_unifrom", "min": 1, "max": 2},
            "unknown distribution 'log_unifrom'; did you mean",
        ),
        ({"distribution": "beta"}, "unknown distribution 'beta'; "),
        ({"values": []}, r"values=\[\] is no list of values"),
        ({"values": "h2o"}, "values='h2o' is no list of values"),
        ({"values": [1, 1]}, "values list 1 twice"),
        ({"values": [1, None]}, "null reaches the command as the text None; write 'null'"),
        ({"value": None}, "null reaches the command as the text None"),
        ({"values": [1, 2], "probabilities": [1]}, "do not go with 2 values"),
        ({"values": [1], "probabilities": [-1]}, "do not go with 1 values"),
        ({"values": [1], "min": 1}, "unexpected min; it takes values"),
        ({"min": 2, "max": 1}, "min=2 is not below max=1"),
        ({"min": 1}, "says not what to try"),
        ({}, "says not what to try"),
        (
            {"distribution": "uniform", "min": "1e-5", "max": 1},
            "min='1e-5' is no number; YAML reads 1e-5 as a text",
        ),
        ({"distribution": "log_uniform_values", "min": 0, "max": 1}, "min=0 has no logarithm"),
        ({"distribution": "int_uniform", "min": 0.5, "max": 2}, "are not whole; use uniform"),
        ({"distribution": "q_uniform", "min": 0, "max": 1, "q": 0}, "q=0 is no step"),
        ({"distribution": "uniform", "min": 0, "max": 1, "q": 2}, "unexpected q"),
        ({"distribution": "normal", "sigma": 0}, "sigma=0 varies nothing"),
        ({"distribution": "uniform", "min": 0.0}, "missing max"),
    ],
)
def test_a_mistake_is_named_with_its_parameter(options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_parameters({"optimizer": {"parameters": {"lr": options}}})
    assert str(caught.value).startswith("parameters.optimizer.lr")


def test_every_distribution_has_corners_that_it_can_draw():
    needs = {
        "categorical": {"values": [1, 2]},
        "categorical_w_probabilities": {"values": [1, 2], "probabilities": [1, 1]},
        "int_uniform": {"min": 1, "max": 2},
    }
    for kind in KINDS:
        limits = {} if "normal" in kind else {"min": 1, "max": 2}
        varied, _ = parse_parameters({"x": {"distribution": kind, **needs.get(kind, limits)}})
        (found,) = varied
        assert len({str(found.value(corner)) for corner in found.corners()}) == 2, kind
