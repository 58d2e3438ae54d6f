"""The ranking of policies and dtypes on a model of two layers that is made here; nothing is downloaded."""

from copy import deepcopy
from dataclasses import replace
from functools import cache as cache_once

import pretrained
import pytest
import ranking
import record
import torch
from pretrained_parts import forced
from ranking_parts import measure, plot, setting, speed, tables
from ranking_parts.results import Results, difference, plain_at, prompts_needed
from ranking_parts.texts import RECALLS, SEGMENTS, Texts, Writer, example
from transformers import PreTrainedModel

from lit_rlkv import CacheSpec
from lit_rlkv.diagnostics.distributions import logits_overlap
from lit_rlkv.kernels.token_logps.reference import chosen_logps, kl_of_logits
from lit_rlkv.kvcache.policies import POLICIES, UNTRAINED
from lit_rlkv.models.backbone import head_logits
from lit_rlkv.types import PromptBatch
from tests.models_zoo import ragged_prompts, tiny_model

N_TOKENS = 1 + 3 * setting.INTERVAL
NO_EOS = torch.tensor([], dtype=torch.long)
UNDRAWN = [policy for policy in UNTRAINED if not POLICIES[policy]().draws]
"""Policies without random numbers, which a decode step draws for other rows, too."""


def given_texts() -> Texts:
    input_ids, attention_mask = ragged_prompts()
    draw = torch.Generator().manual_seed(0)
    shape, n_tokens = (len(input_ids), N_TOKENS), tiny_model("llama").config.vocab_size
    tokens = torch.randint(1, n_tokens, shape, generator=draw)
    return Texts(PromptBatch(input_ids, attention_mask.bool()), tokens, tokens * 0, tokens * 0)


@cache_once
def wide_model() -> PreTrainedModel:
    """In float64, where no float error moves a scale of int4 over a rounding."""
    return deepcopy(tiny_model("llama")).double()


def cache(policy: str, dtype: str | None = None, interval: int = setting.INTERVAL) -> CacheSpec:
    return CacheSpec(policy, budget=8, interval=interval, sink=1, window=2, dtype=dtype)


def logps_by_step(texts: Texts, spec: CacheSpec) -> torch.Tensor:
    """Decode token by token."""
    model = wide_model()
    is_token = torch.ones_like(texts.tokens, dtype=torch.bool)
    hidden = torch.zeros(*texts.tokens.shape, model.config.hidden_size, dtype=model.dtype)
    reference = forced.Reference(texts.prompts, texts.tokens, is_token, hidden, NO_EOS)
    return forced.compare(model, reference, spec, torch.Generator()).logps[:, 1:]


def logps_by_interval(texts: Texts, spec: CacheSpec) -> torch.Tensor:
    model = wide_model()
    hidden = torch.cat([*measure.hidden_of(model, texts, spec, torch.Generator())], dim=1)
    logits = head_logits(model, hidden).flatten(0, 1)
    return chosen_logps(logits, texts.tokens[:, 1:].flatten(), 1.0).view(len(texts.tokens), -1)


@pytest.mark.parametrize("dtype", [None, "int4"])
@pytest.mark.parametrize("policy", UNDRAWN)
def test_tokens_read_by_interval_are_those_of_decode_steps(policy: str, dtype: str | None):
    texts = given_texts()
    by_step = logps_by_step(texts, cache(policy, dtype))
    torch.testing.assert_close(logps_by_interval(texts, cache(policy, dtype)), by_step, atol=1e-5, rtol=0)
    # What the comparison would show of a cache that evicts a token earlier.
    other = logps_by_step(texts, cache(policy, dtype, setting.INTERVAL - 1))
    assert (other - by_step).abs().max() > 1e-2


def test_statistics_are_those_of_the_packages_functions():
    draw = torch.Generator().manual_seed(0)
    dense, logits = torch.randn(2, 3, 5, 11, generator=draw)
    tokens = torch.randint(0, 11, (3, 5), generator=draw)
    found = measure.compare(dense.log_softmax(-1), logits, tokens)
    for row in range(3):
        torch.testing.assert_close(found.kl[row], kl_of_logits(dense[row], logits[row], 1.0))
        torch.testing.assert_close(found.reverse_kl[row], kl_of_logits(logits[row], dense[row], 1.0))
        torch.testing.assert_close(found.overlap[row], logits_overlap(logits[row], dense[row], 1.0))
        torch.testing.assert_close(found.logps[row], chosen_logps(logits[row], tokens[row], 1.0))
    assert (found.kl - found.reverse_kl).abs().min() > 1e-3  # the directions differ


def test_parts_of_a_response_count_where_they_stand():
    # One row, tokens 1 to 4: a word, a value of two tokens of which one is not the top one, a word.
    segment = torch.tensor([[0, 1, SEGMENTS.index("own"), SEGMENTS.index("own"), 1]])
    answer = torch.tensor([[0, 0, 1, 1, 0]])
    texts = Texts(PromptBatch(segment, segment > 0), segment, segment, answer)
    kl = torch.tensor([[1.0, 10.0, 20.0, 3.0]])
    found = measure.Compared(-kl, kl, kl, kl / 100, torch.tensor([[True, True, False, True]]))
    row = measure.summary(found, texts)
    assert row["kl"]["text"] == [2.0]
    assert row["kl"]["own"] == [15.0]
    assert row["kl_all"] == [8.5]
    assert row["recall"]["own"] == {"right": [[0]], "logps": [[-30.0]]}
    assert row["recall"]["later"]["right"] == [[]]
    assert row["along"]["kl"] == [8.5, *[None] * (len(measure.EDGES) - 1)]
    assert [place for place, n in enumerate(row["overlap"]) if n] == [1, 3, 10, 20]


def test_each_fact_stands_once_and_is_asked_for_where_it_is_said_to_be():
    for number in range(40):
        one = example(number)
        names = [name for name, _ in (one.asked, *one.later, *one.own)]
        assert len(set(names)) == 5
        for name, value in (one.asked, *one.later):
            assert one.message.count(f"The {name} is {value}.") == 1
        assert f"What is the {one.asked[0]}?" in one.message
        assert not any(name in one.message for name, _ in one.own)
    assert len({example(number).message for number in range(40)}) == 40


def test_needed_prompts_follow_the_paired_differences():
    low, high = [0.1, 0.2, 0.3], [0.2, 0.5, 0.5]  # differences 0.1, 0.3, 0.2
    assert difference(low, high).value == pytest.approx(0.2)
    # s / m = 0.5; ((3.182 + 0.978) · 0.5)² = 4.3 for n = 4, ((2.776 + 0.941) · 0.5)² = 3.5 for n = 5
    assert prompts_needed(low, high) == 5
    assert prompts_needed(high, low) is None


def small_row(slots: int, n_bytes: int, kl: float) -> dict:
    cell = {
        "model": "m",
        "policy": "h2o",
        "dtype": None,
        "slots": slots,
        "counted": setting.SLOTS,
        "chunk": 0,
    }
    return {"cell": cell, "kl": {"text": [kl]}, "bytes": {"slots": n_bytes, "record": 0, "beside": 0}}


def test_between_two_sizes_the_kl_is_interpolated_and_outside_it_is_not_known():
    results = Results.of([small_row(1, 100, 0.4), small_row(2, 400, 0.1)])
    assert plain_at(results, "h2o", 200) == [pytest.approx(0.2)]  # half way in both logarithms
    assert plain_at(results, "h2o", 99) is None
    assert plain_at(results, "rkv", 200) is None


def test_equal_bytes_are_equal_and_the_record_costs_keys():
    model = tiny_model("llama")
    whole = {}
    for dtype in setting.DTYPES:
        for counted in (setting.SLOTS, setting.ALL):
            cell = setting.Cell("h2o", dtype, 96, counted, tokens=225)
            spec = setting.cache_of(cell, model, 200)
            whole[dtype, counted] = spec.budget, setting.row_bytes(spec, model, 200, 225)
    plain_budget, plain = whole[None, setting.SLOTS]
    assert plain_budget == 96 - setting.INTERVAL
    for dtype in ("int8", "int4"):
        budget, parts = whole[dtype, setting.SLOTS]
        assert 0.97 * plain["slots"] < parts["slots"] <= plain["slots"]
        assert parts["record"] > plain["record"]
        fewer, parts = whole[dtype, setting.ALL]
        assert fewer < budget
        assert 0.97 * sum(plain.values()) < sum(parts.values()) <= sum(plain.values())


def test_a_response_has_its_parts_in_order_and_equal_length(folder):
    models = ranking.Models(folder)
    texts = Writer(models.float32, models.tokenizer).write(1, 2, 400)
    assert texts.tokens.shape == (2, 400)
    for row in range(2):
        one, ids, segment = example(2 + row), texts.tokens[row], texts.segment[row]
        decoded = models.tokenizer.decode(ids)
        (name, value), (own, said) = one.asked, one.own[0]
        assert decoded.startswith(f" The {name} is {value}. The {own} is {said}.")
        assert decoded.endswith(f" The {one.own[-1][0]} is {one.own[-1][1]}.")
        assert models.tokenizer.decode(ids[segment == SEGMENTS.index("asked")]) == f" {value}"
        values = [f" {value}" for _, value in one.later]
        assert models.tokenizer.decode(ids[segment == SEGMENTS.index("later")]) == "".join(values)
        order = [SEGMENTS[number] for number in segment.unique_consecutive().tolist() if number]
        assert order == ["asked", "text", "later", "later", "own", "own"]
    with pytest.raises(ValueError, match="take more"):
        Writer(models.float32, models.tokenizer).write(0, 2, 40)


def test_an_option_is_compared_with_its_policy_alone():
    spec = setting.cache_of(setting.Cell("tova value_norms", None, 96, tokens=225), tiny_model("llama"), 200)
    assert (spec.policy, spec.policy_options) == ("tova", {"value_norms": True})
    rows = [small_row(1, 100, 0.4), small_row(1, 100, 0.1)]
    rows[1]["cell"]["policy"] = "h2o value_norms"
    for row in rows:
        row["kl"]["text"] *= 2
        row["recall"] = {name: {"right": [[1, 0]]} for name in RECALLS}
    results = Results.of(rows, options=True)
    assert [row["cell"]["policy"] for row in results.rows] == ["h2o value_norms"]
    told = tables.options(results, Results.of(rows))
    assert "| 1 | 16 bit | `h2o value_norms` | 0.10 (0.10–0.10) | 0.30 (0.30–0.30) | 1/2" in told


def test_rollouts_are_timed_in_turn_with_those_of_all_keys(folder):
    models = ranking.Models(folder)
    sizes = replace(setting.FAST, slots=(384,), rows=2, tokens=3)
    rows = [*speed.measure(models.float32, models.tokenizer, sizes, 2)]
    named = [(row["cell"]["policy"], row["cell"]["dtype"]) for row in rows if row["round"] == 1]
    assert len(rows) == 2 * len(named) == 2 * len({*named})
    assert {("dense", "int4"), ("snapkv", None), ("expected", "int8")} <= {*named}
    rows = [{**row, "seconds": 2.0, "all_keys_seconds": 3.0} for row in rows]
    assert "| `snapkv` | int4 | 3 | 1.50 (1.50–1.50) |" in speed.table(rows)


TINY = replace(setting.FAST, slots=(384, 448), rows=2, tokens=401, with_record=("snapkv",))


def test_a_run_that_was_cut_off_goes_on_and_is_reported(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(record, "is_on", True)
    monkeypatch.setattr(record, "unrecorded", [])
    wanted = [*setting.cells(TINY, [0])]
    plain = measure.Measurer.measure

    def cut_off(measurer, cell):
        if len(record.rows(setting.NAME)) == 4:
            raise KeyboardInterrupt
        return plain(measurer, cell)

    with monkeypatch.context() as patch:
        patch.setattr(measure.Measurer, "measure", cut_off)
        with pytest.raises(KeyboardInterrupt):
            ranking.run(folder, "tiny", TINY, [0], 10)
    rows = ranking.run(folder, "tiny", TINY, [0], 10)
    assert [row["cell"] for row in rows] == [cell.described("tiny") for cell in wanted]
    assert pretrained.missing(wanted, "tiny", rows) == []
    dense = rows[0]
    assert max(abs(kl) for kl in dense["kl"]["text"]) < 1e-5
    evicted = [row for row in rows if row["cell"]["slots"] and row["cell"]["dtype"] is None]
    assert min(kl for row in evicted for kl in row["kl"]["text"]) > 1e-4
    for n in (0, 3, len(rows)):
        told = tables.report(Results.of(rows[:n]))
        assert "None" not in told
        plot.draw(Results.of(rows[:n]), tmp_path / f"{n}.png")
    assert "### Along the response" in told
    assert "| 448 | int4 | the same, measured |" in told


def test_the_tables_of_the_docs_are_what_the_rows_say():
    text = (record.ROOT / "docs" / "results" / "ranking.md").read_text(encoding="utf-8")
    results = Results.of(record.rows(setting.NAME))
    options = tables.options(Results.of(record.rows(setting.NAME), options=True), results)
    gemma = Results.of(record.rows(setting.NAME), "gemma-3-270m-q4_k_m")
    parts = [tables.report(results), options, speed.table(record.rows(speed.NAME)), tables.dtypes(gemma)]
    printed = "\n".join([*parts, *(tables.ranking(gemma, slots) for slots in gemma.sizes)])
    lines = {line for line in printed.splitlines() if line.startswith("| ") and "---" not in line}
    assert len(lines) > 30
    choose = (record.ROOT / "docs" / "how-to" / "choose-a-key-dtype.md").read_text(encoding="utf-8")
    assert lines <= {*text.splitlines(), *choose.splitlines()}
