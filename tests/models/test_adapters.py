"""Where adapters may go."""

import pytest

from lit_rlkv.models.adapters import check_target_modules
from tests.models_zoo import tiny_model


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ["q_proj", "down_proj"], ["self_attn.v_proj"], ["embed_tokens"], r".*\.[qv]_proj"],
)
def test_names_of_modules_with_a_matrix_pass(targets):
    check_target_modules(tiny_model(), targets)


@pytest.mark.parametrize(
    ("targets", "unknown"),
    [(["zzz"], "zzz"), (["q_proj", "y", "z"], "y, z"), (["self_attn"], "self_attn"), ("q_proj", "q_proj")],
)
def test_names_that_match_nothing_are_named(targets, unknown):
    with pytest.raises(ValueError, match=f"nothing in this model is called {unknown}; choose from .*v_proj"):
        check_target_modules(tiny_model(), targets)
