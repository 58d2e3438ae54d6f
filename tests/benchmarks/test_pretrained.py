"""The pretrained benchmark on a model of two layers that is made here; nothing is downloaded."""

import re
from dataclasses import replace

import pretrained
import pytest
import record
import torch
from pretrained_parts import plot, prompts, rollouts, tables
from pretrained_parts.forced import compare, reference_of
from pretrained_parts.prefills import StoredPrefills
from pretrained_parts.results import Results
from pretrained_parts.setting import FAST, cells

from lit_rlkv import CacheSpec, generate, replay_logps
from lit_rlkv.diagnostics.distributions import view_overlap
from lit_rlkv.types import PromptBatch, Rollout
from tests.models_zoo import ragged_prompts, tiny_model

SMALL = CacheSpec("h2o", budget=8, interval=2, sink=1, window=2)
NO_EOS = torch.tensor([], dtype=torch.long)


def sampled(cache: CacheSpec, n_tokens: int = 12) -> Rollout:
    input_ids, attention_mask = ragged_prompts()
    options = {"eos_token_id": None, "pad_token_id": 0, "generator": torch.Generator().manual_seed(3)}
    model = tiny_model("llama")
    return generate(model, input_ids, attention_mask, cache=cache, max_new_tokens=n_tokens, **options)


def compared(rollout: Rollout, cache: CacheSpec):
    batch = PromptBatch(*(part.bool() if i else part for i, part in enumerate(ragged_prompts())))
    reference = reference_of(tiny_model("llama"), batch, rollout, NO_EOS)
    return compare(tiny_model("llama"), reference, cache, torch.Generator())


def response(values: torch.Tensor) -> torch.Tensor:
    return values[:, ragged_prompts()[0].shape[1] :]


def test_given_responses_have_the_log_probs_and_the_overlap_of_the_rollout_that_sampled_them():
    rollout = sampled(SMALL)
    found = compared(rollout, SMALL)
    torch.testing.assert_close(found.logps, response(rollout.rollout_logps), atol=1e-5, rtol=0)
    dense = replay_logps(tiny_model("llama"), rollout, shadow=False)
    torch.testing.assert_close(found.dense_logps, response(dense), atol=1e-5, rtol=0)
    overlap = view_overlap(tiny_model("llama"), rollout, 1.0)
    torch.testing.assert_close(found.overlap, response(overlap), atol=1e-5, rtol=0)
    assert found.kl.max() > 0.01
    # What the comparison would show of a cache that evicts other keys.
    other = compared(rollout, replace(SMALL, policy="streaming"))
    assert (other.logps - response(rollout.rollout_logps)).abs().max() > 0.01


@pytest.mark.parametrize("policy", ["h2o", "random"])
def test_a_stored_prefill_leaves_the_rollout_as_it_is(policy: str):
    cache = CacheSpec(policy, budget=8, interval=2, sink=1, window=2)
    expected = sampled(cache)
    prefills = StoredPrefills(tiny_model("llama"))
    with prefills.active():
        sampled(CacheSpec.dense())
        found = sampled(cache)
    assert prefills.n_forwards == 1
    assert torch.equal(found.input_ids, expected.input_ids)
    assert torch.equal(found.evicted_at, expected.evicted_at)
    assert torch.equal(sampled(cache).input_ids, expected.input_ids)  # the forward is back


def test_documents_hold_the_answer_once_and_far_from_the_question():
    for example in prompts.recall(20):
        text, question = example.prompt.rsplit("Question:", 1)
        name = question.split("the ", 1)[1].split("?")[0]
        assert text.count(f"The {name} is {example.answer}.") == 1
        assert text.count(f"the {name}?") == 0
        assert question.endswith("Answer: The")
    assert prompts.recall(3) == prompts.recall(20)[:3]


def test_an_answer_is_the_last_word_of_the_first_line():
    example = prompts.Example("", "Oslo")
    assert example.is_right(" The capital of Norway is Oslo.\nQuestion: Oslo")
    assert not example.is_right(" Oslo is the capital of Norway.")
    assert not example.is_right("\n")


def test_statistics_of_a_length_are_those_of_the_first_tokens():
    rollout = sampled(SMALL, n_tokens=40)
    log_ratio = torch.zeros_like(rollout.rollout_logps)
    start = ragged_prompts()[0].shape[1]
    log_ratio[0, start + 32 :] = 1.0  # after the first 32 tokens
    by_length = rollouts.by_length(rollout.rollout_logps + log_ratio, rollout)
    assert list(by_length) == ["32"]
    assert by_length["32"]["ess_sequence"] == pytest.approx(1, abs=1e-5)
    assert by_length["32"]["clipped"] == 0
    log_ratio[0, start] = 1.0  # ratio e, clipped to 2
    found = rollouts.by_length(rollout.rollout_logps + log_ratio, rollout)["32"]
    n = len(log_ratio)
    assert found["clipped"] == pytest.approx(1 / (32 * n))
    assert found["masked"] == pytest.approx(1 / (32 * n))
    e = torch.e
    assert found["ess_sequence"] == pytest.approx((e + n - 1) ** 2 / (n * (e**2 + n - 1)), rel=1e-4)


TINY = replace(FAST, prompts=(1, 1, 1), turn_tokens=4, history_tokens=4, answer_tokens=4)
TINY = replace(TINY, long=(2, 64, 48), bf16=(2, 8, 48))


@pytest.fixture(scope="module")
def rows(folder, tmp_path_factory):
    """All rows of a small run, which is cut off once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "RESULTS", tmp_path_factory.mktemp("results"))
        wanted = list(cells(TINY, 1))
        measure, n_measured = pretrained.timed, 0

        def cut_off(*args):
            nonlocal n_measured
            n_measured += 1
            if n_measured == 3:
                raise KeyboardInterrupt
            return measure(*args)

        patch.setattr(pretrained, "timed", cut_off)
        with pytest.raises(KeyboardInterrupt):
            pretrained.run(folder, "tiny", TINY, 1, 10)
        assert len(record.rows(pretrained.NAME)) == 2
        rows = pretrained.run(folder, "tiny", TINY, 1, 10)
        assert n_measured == len(wanted) + 1  # the one that was cut off ran twice
        assert [row["cell"] for row in rows] == [cell.described("tiny") for cell in wanted]
        return record.rows(pretrained.NAME)


def test_the_report_has_every_table_and_leaves_out_what_is_missing(rows, tmp_path):
    results = Results.of(rows)
    whole = tables.report(results)
    for title in ("recall", "few_shot", "chat", "What reweighting keeps", "Replay gap", "Memory", "Means"):
        assert f"## {title}" in whole
    for place in range(len(rows)):
        assert "None" not in tables.report(Results.of(rows[:place]))
    plot.draw(Results.of(rows[:2]), tables.SHOWN_BUDGET, tmp_path / "part.png")
    plot.draw(results, tables.SHOWN_BUDGET, tmp_path / "whole.png")
    assert (tmp_path / "whole.png").stat().st_size > 10_000


def test_the_lines_of_the_tables_of_the_docs_are_what_the_rows_say():
    text = (record.ROOT / "docs" / "results" / "pretrained.md").read_text(encoding="utf-8")
    printed = tables.report(Results.of(record.rows(pretrained.NAME)))
    lines = {line for line in printed.splitlines() if line.startswith(("| `", "| dense"))}
    assert len(lines) > 60
    own = re.sub(
        r"^## A model with windows\n.*?(?=^## )", "", text, flags=re.M | re.S
    )  # another model's rows
    assert {line for line in own.splitlines() if line.startswith(("| `", "| dense"))} == lines
    for ranking in tables.rankings(Results.of(record.rows(pretrained.NAME))):
        assert f"| {ranking[1]} |" in text
