"""The closing table."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from lit_rlkv.evaluation.results import CacheEstimates, EvalRow, IntervalEstimate, RewardReport
from lit_rlkv.reporting.tables import (
    compare_caches,
    cost_cells,
    evaluation_cells,
    markdown_table,
    score_cells,
    score_table,
    summary_table,
)


def eval_row(cache, budget, accuracy, kv_bytes=1024, kl=0.0, replay_gap=1e-6):
    return EvalRow(cache, budget, accuracy, 100, 10.0, kv_bytes, kl, replay_gap)


BEFORE = [
    eval_row("dense", None, 0.99, 4096),
    eval_row("random 16+4", 16, 0.46, 1024, kl=0.4, replay_gap=2e-5),
]
AFTER = [
    eval_row("dense", None, 0.98, 4096),
    eval_row("random 16+4", 16, 0.81, 1024, kl=0.1, replay_gap=1e-5),
]


def shown(table, width=80):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_rows_of_one_cache_stand_side_by_side():
    headings, (dense, sparse) = evaluation_cells(BEFORE, AFTER)
    assert headings == [
        "Cache",
        "Accuracy before",
        "Accuracy after",
        "KV bytes",
        "of dense",
        "KL before",
        "KL after",
        "Replay gap",
    ]
    assert dense == ["dense", "0.990", "0.980", "4.00 KiB", "100%", "0.0000", "0.0000", "1.0e-06"]
    # 1024 of 4096 bytes; of both gaps the larger
    assert sparse == ["random 16+4", "0.460", "0.810", "1.00 KiB", "25%", "0.4000", "0.1000", "2.0e-05"]


@pytest.mark.parametrize(("before", "after"), [([], AFTER), (AFTER, [])])
def test_a_single_evaluation_has_single_columns(before, after):
    headings, (_, sparse) = evaluation_cells(before, after)
    assert headings == ["Cache", "Accuracy", "KV bytes", "of dense", "KL", "Replay gap"]
    assert sparse == ["random 16+4", "0.810", "1.00 KiB", "25%", "0.1000", "1.0e-05"]


def test_missing_measurements_are_dashes():
    _, (sparse, other) = evaluation_cells(BEFORE[1:], [eval_row("h2o 8+4", 8, 0.5), BEFORE[1]][::-1])
    assert sparse[4] == "–"
    assert other[:3] == ["h2o 8+4", "–", "0.500"]


def test_an_evaluation_that_lists_a_cache_twice_is_refused():
    with pytest.raises(ValueError, match="lists a cache twice"):
        compare_caches([], [AFTER[1], AFTER[1]])


def test_the_terminal_shows_both_tables_in_eighty_columns():
    text = shown(summary_table(BEFORE, AFTER, {"rl": 92.0}))
    assert "random 16+4" in text
    assert "0.810" in text
    assert "1:32" in text
    assert "negative at times" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_reward_model_is_summed_up_in_a_sentence_and_its_scores_in_a_table():
    judged = RewardReport(512, 0.9375, 4.5, 2.25, 0.031, [0.5], [0.5], [1024])
    after = [replace(row, learned_reward=1.5) for row in AFTER]
    text = shown(summary_table(BEFORE, after, {}, judged))
    assert "93.8% ranked right, margin 4.50 ± 2.25" in text
    assert "calibration error 0.031" in " ".join(text.split())
    assert text.count("1.50") == len(AFTER)
    assert max(map(len, text.splitlines())) <= 80
    assert "Learned" not in shown(summary_table(BEFORE, AFTER, {}))
    # The reward head that SFT trained is no part of a run that a verifier rewards.
    assert "ranked right" not in shown(summary_table(BEFORE, AFTER, {}, judged))


def test_names_in_brackets_are_no_markup():
    assert "[bold]x[/]" in shown(summary_table([], [eval_row("[bold]x[/]", 8, 0.5)], {"[red]": 1.0}))


DENSE = EvalRow("dense", None, 0.75, 8, 5.5, 2048, 0.0, 1e-7)
SPARSE = EvalRow("snapkv 7+2", 7, 0.5, 8, 6.0, 512, 0.0123, 2e-7)
FOUND = CacheEstimates(
    accuracy=IntervalEstimate(0.75, 0.5, 1.0),
    mean_length=IntervalEstimate(5.5, 5.0, 6.0),
    pass_at_k={1: IntervalEstimate(0.75, 0.5, 1.0), 4: IntervalEstimate(0.875, 0.625, 1.0)},
)


def test_every_score_stands_with_its_interval_under_its_heading():
    headings, (_, sparse) = score_cells([(DENSE, FOUND), (SPARSE, FOUND)])
    assert dict(zip(headings, sparse, strict=True)) == {
        "Cache": "snapkv 7+2",
        "Accuracy": "0.750 [0.500, 1.000]",
        "pass@1": "0.750 [0.500, 1.000]",
        "pass@4": "0.875 [0.625, 1.000]",
        "Tokens": "5.5 [5.0, 6.0]",
    }


def test_costs_are_compared_with_the_dense_cache():
    headings, (dense, sparse) = cost_cells([DENSE, SPARSE])
    assert dict(zip(headings, sparse, strict=True)) == {
        "Cache": "snapkv 7+2",
        "KV bytes": "512 B",
        "of dense": "25%",
        "KL": "0.0123",
        "Replay gap": "2.0e-07",
    }
    assert dict(zip(headings, dense, strict=True))["of dense"] == "100%"
    assert cost_cells([SPARSE])[1][0][2] == "–"


def test_the_learned_reward_is_shown_where_there_is_one():
    headings, (first, second) = cost_cells([replace(DENSE, learned_reward=1.25), SPARSE])
    assert (headings[-1], first[-1], second[-1]) == ("Learned reward", "1.25", "–")
    assert "Learned reward" not in cost_cells([DENSE])[0]


def test_the_terminal_says_what_the_brackets_are():
    console = Console(width=80, file=StringIO())
    console.print(score_table([(DENSE, FOUND)], 0.9))
    assert "[low, high] is the 90% interval over prompts" in console.file.getvalue()
    assert "2.00 KiB" in console.file.getvalue()  # whole on a narrow terminal


def test_cells_cannot_end_their_table():
    text = markdown_table(["a", "b"], [["x|y", "a\nb"], [0.123456, None]])
    assert text.splitlines() == ["| a | b |", "| --- | --- |", "| x&#124;y | a<br>b |", "| 0.1235 | – |"]
