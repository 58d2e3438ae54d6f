from dataclasses import replace

import torch
from quantized_parts import replay, report
from quantized_parts.answers import BUDGETS, DTYPES, QuantizedCell, cells, equal_budget

from lit_rlkv import CacheSpec, prepare_backbone
from lit_rlkv.kernels.quantization import KV_DTYPES
from tests.models_zoo import VOCAB, build, tiny_config

SPEC = CacheSpec("h2o", budget=8, interval=3, sink=1, window=3)


def test_budgets_of_equal_bytes_match_hand_arithmetic():
    # 64 keys of 64 dimensions in 16 bit are 8,192 bytes; 8192 / 66 = 124.1, 8192 / 36 = 227.6
    assert [equal_budget(64, dtype) for dtype in DTYPES] == [64, 124, 124, 227]


def test_cells_are_caches_of_their_dtype_that_are_told_apart():
    found = list(cells())
    assert len({str(cell.described("model")) for cell in found}) == len(found) == 2 * 4 * (1 + len(BUDGETS))
    cell = QuantizedCell("recall", "snapkv", 124, dtype="int8", keys_16bit=64)
    assert (cell.cache.dtype, cell.cache.budget, cell.cache.interval) == ("int8", 124, 31)


def test_the_learner_with_the_record_is_the_one_that_rounds_like_the_sampler():
    torch.manual_seed(0)
    model = prepare_backbone(build(tiny_config("qwen3", num_hidden_layers=4)))
    prompts = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    for dtype in KV_DTYPES:
        row = replay.measure(model, prompts, replace(SPEC, dtype=dtype), 20)
        assert row["gap"]["max"] < 1e-5 < row["unrounded"]["max"]
        assert row["gap_moved"] <= row["by_itself_moved"] < 0.5
        assert len(row["gap_moved_by_layer"]) == 4
        cell = {"block": "replay", "precision": "float32", "policy": "h2o", "dtype": dtype}
        assert f"float32 h2o {dtype}: gap mean" in report.line({"cell": cell, **row})
    assert set(replay.measure(model, prompts, SPEC, 4)) == {"n_response_tokens", "gap"}
