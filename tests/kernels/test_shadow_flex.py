import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.shadow_attention import flex, reference
from tests.kernels.accuracy import bound
from tests.kernels.shadow_cases import Case, cache_deaths, make_case, random_deaths

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CASES = {
    "any deaths": make_case(33, 2, random_deaths(33)),
    "a cache": make_case(130, 1, cache_deaths(130)),
    "one table for all heads": make_case(33, 2, random_deaths(33, n_kv_heads=1)),
    "soft-capped logits": make_case(17, 4, random_deaths(17), softcap=3.0),
}


def gap(case: Case, death: Tensor) -> float:
    inputs = (case.query, case.key, case.value)
    out = flex.shadow_attention(*inputs, death, case.scaling, softcap=case.softcap)
    truth = reference.shadow_attention(*inputs, case.death, case.scaling, softcap=case.softcap)
    return float((out - truth).abs().max() / torch.finfo(case.query.dtype).eps)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flex_attention_under_the_death_table_is_the_same_function(case: Case):
    assert gap(case.to(torch.float32), case.death) <= 20 * bound(torch.float32)


def test_the_comparison_catches_deaths_one_later_and_heads_swapped():
    case = CASES["any deaths"].to(torch.float32)
    assert gap(case, (case.death.long() + 1).clamp(max=2**31 - 1)) > 1000
    assert gap(case, case.death.flip(1)) > 1000
