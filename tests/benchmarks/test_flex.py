import pytest
import torch
from kernel_parts import flex
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from lit_rlkv.kernels.shadow_attention import reference
from tests.kernels.accuracy import bound
from tests.kernels.shadow_cases import Case, cache_evictions, make_case, random_evictions

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CASES = {
    "any evictions": make_case(33, 2, random_evictions(33)),
    "a cache": make_case(130, 1, cache_evictions(130)),
    "one table for all heads": make_case(33, 2, random_evictions(33, n_kv_heads=1)),
    "four query heads a KV head": make_case(17, 4, random_evictions(17)),
}


def gap(case: Case, evicted_at: Tensor) -> float:
    inputs = (case.query, case.key, case.value)
    group = case.query.shape[1] // case.key.shape[1]
    mask = flex.block_mask(evicted_at, group)
    out = flex_attention(*inputs, block_mask=mask, scale=case.scaling, enable_gqa=group > 1)
    truth = reference.shadow_attention(*inputs, case.evicted_at, case.scaling)
    return float((out - truth).abs().max() / torch.finfo(case.query.dtype).eps)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flex_attention_under_the_eviction_table_is_the_same_function(case: Case):
    assert gap(case.to(torch.float32), case.evicted_at) <= 20 * bound(torch.float32)


def test_the_comparison_catches_evictions_one_later_and_heads_swapped():
    case = CASES["any evictions"].to(torch.float32)
    assert gap(case, (case.evicted_at.long() + 1).clamp(max=2**31 - 1)) > 1000
    assert gap(case, case.evicted_at.flip(1)) > 1000
