"""The gap of each part of the record: near zero with it, far from zero without it."""

import re
from dataclasses import replace

import pytest
import record
import torch
from replay_parts import choices, codes, evictions, logits
from rollout_parts.setting import Setting

from lit_rlkv import CacheSpec, prepare_backbone
from lit_rlkv.kernels.quantization import KV_DTYPES
from tests.models_zoo import VOCAB, build, tiny_config

TOY = Setting("tiny", "h2o", batch=2, new=32, rounds=1, device=torch.device("cpu"), dtype=torch.float32)
PAGE = record.ROOT / "docs" / "concepts" / "recorded-choices.md"


def test_the_gap_is_rounding_and_a_dense_learners_is_not():
    row = evictions.measure(TOY, TOY.cache(16), "auto")
    assert row["n_tokens"] == 2 * 32
    assert 0 <= row["gap"]["mean"] <= row["gap"]["p99"] <= row["gap"]["max"] < 1e-4
    assert 0 <= row["no_eviction"]["mean"] < 1e-4
    assert row["dense_learner"]["mean"] > 1e-3


def test_evictions_of_another_column_show_in_the_gap(monkeypatch: pytest.MonkeyPatch):
    roll_out = Setting.roll_out

    def wrong(setting: Setting, *args: object, **options: object):
        found = roll_out(setting, *args, **options)
        return found.with_record(evicted_at=found.evicted_at.roll(1, dims=3))

    # Not of another layer: attention of random weights is so even that h2o evicts the same keys in all.
    monkeypatch.setattr(Setting, "roll_out", wrong)
    assert evictions.measure(TOY, TOY.cache(16), "auto")["gap"]["max"] > 1e-3


def test_a_bfloat16_model_with_float32_logits_is_closer_than_with_rounded_ones():
    model, cache = logits.make_model(torch.bfloat16, "cpu"), logits.CACHES["snapkv 24+8"]
    ours = logits.measure(model, cache, 8, 64)
    with logits.rounded_logits(model):
        rounded = logits.measure(model, cache, 8, 64)
    assert all(ours[name] < 0.9 * rounded[name] for name in ours)


def test_replay_is_exact_with_all_choices_and_not_without_keys_or_tokens():
    figures = choices.measure(0, "float32", "cpu", 2, 32)
    gaps = {name: gap["max"] for name, gap in figures["gaps"].items()}
    assert gaps["all three"] < 1e-4
    assert gaps["all but expert_ids"] < 1e-4  # without rounding no expert flips
    assert min(gaps[name] for name in ("all but evicted_at", "all but sampling_masks", "none")) > 0.05
    found = figures["bytes_per_token"]
    assert (found["evicted_at"], found["expert_ids"]) == (2 * 6 * 2, 6 * 8)
    assert 4 < found["sampling_masks"] <= 4 * (1 + 50)


def test_the_page_of_the_choices_shows_what_the_last_run_measured():
    row = record.rows(choices.NAME)[-1]
    held, gaps = choices.tables(row["figures"]).split("\n\n")
    page = PAGE.read_text(encoding="utf-8").replace("`", "")
    for line in gaps.splitlines()[1:]:
        assert "| " + " | ".join(re.split(r"\s{2,}", line)) + " |" in page
    sizes = [line.split()[-1] for line in held.splitlines()[1:]]
    assert f"take {sizes[0]}, {sizes[1]} and {sizes[2]} bytes per token" in page


def test_the_learner_with_the_record_of_the_codes_is_the_one_that_quantizes_like_the_sampler():
    torch.manual_seed(0)
    model = prepare_backbone(build(tiny_config("qwen3", num_hidden_layers=4)))
    prompts = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    spec = CacheSpec("h2o", budget=8, interval=3, sink=1, window=3)
    for dtype in KV_DTYPES:
        row = codes.measure(model, prompts, replace(spec, dtype=dtype), 20)
        found = row["learners"]
        assert row["group"] == 64
        assert found["64"]["max"] == row["gap"]["max"]
        assert max(found[str(group)]["max"] for group in codes.GROUPS) < 1e-5 < found[codes.UNROUNDED]["max"]
        assert max(found[str(group)]["apart"] for group in codes.GROUPS) <= found[codes.ALONE]["apart"] < 0.5


def test_rows_of_the_codes_are_those_of_the_page():
    rows = [row for row in record.rows(codes.NAME) if row["cell"]["block"] == "replay"]
    text = (record.ROOT / "docs" / "results" / "pretrained.md").read_text(encoding="utf-8")
    assert len(rows) == 8
    assert len(codes.table(rows).splitlines()) == 1 + 2 * (1 + 3 * 5)
    for found in (found for row in rows for found in row["learners"].values()):
        assert "| {mean:.1e} | {p99:.1e} | {max:.1e} |".format(**found) in text
