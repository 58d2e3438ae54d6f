"""The closing table."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from lit_rlkv.evaluation.results import CacheEstimates, EvalRow, IntervalEstimate, RewardReport
from lit_rlkv.reporting.tables import (
    evaluation_cells,
    markdown_table,
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


BOTH = {"before": BEFORE, "after": AFTER}


def test_rows_of_one_cache_stand_together():
    headings, rows = evaluation_cells(BOTH)
    assert headings == ["Cache", "When", "Accuracy", "KV bytes", "of dense", "KL", "Replay gap"]
    assert rows == [
        ["dense", "before", "0.990", "4.00 KiB", "100%", "0.0000", "1.0e-06"],
        ["dense", "after", "0.980", "4.00 KiB", "100%", "0.0000", "1.0e-06"],
        ["random 16+4", "before", "0.460", "1.00 KiB", "25%", "0.4000", "2.0e-05"],  # 1024 of 4096 bytes
        ["random 16+4", "after", "0.810", "1.00 KiB", "25%", "0.1000", "1.0e-05"],
    ]


def test_a_share_is_of_the_dense_cache_of_the_same_evaluation():
    _, rows = evaluation_cells({"before": BEFORE[1:], "after": AFTER})
    assert [row[4] for row in rows] == ["–", "25%", "100%"]


def test_runs_have_accuracies_with_intervals():
    # Wilson intervals of 100 problems
    _, (_, sparse) = evaluation_cells({"a": AFTER}, name="Run", with_intervals=True)
    assert sparse[:3] == ["random 16+4", "a", "81.0% [72.2, 87.5]"]


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
    reward=IntervalEstimate(0.5, -0.25, 1.25),
    mean_length=IntervalEstimate(5.5, 5.0, 6.0),
    pass_at_k={1: IntervalEstimate(0.75, 0.5, 1.0), 4: IntervalEstimate(0.875, 0.625, 1.0)},
)


def test_the_learned_reward_is_shown_where_there_is_one():
    headings, (first, second) = evaluation_cells({"after": [replace(DENSE, learned_reward=1.25), SPARSE]})
    assert (headings[-1], first[-1], second[-1]) == ("Learned reward", "1.25", "–")
    assert "Learned reward" not in evaluation_cells({"after": [DENSE]})[0]


def test_accuracy_and_reward_are_shown_as_far_as_they_are_known_and_so_is_a_cache_that_evicts_nothing():
    unknown = replace(SPARSE, accuracy=None, reward=0.25, affected=0.0)
    headings, (cells,) = evaluation_cells({"after": [unknown]}, with_intervals=True)
    assert headings[2:5] == ["Reward", "KV bytes", "of dense"]
    assert (cells[2], cells[4]) == ("0.250", "evicts nothing")
    lost = replace(SPARSE, reward=0.25, affected=0.1)
    dense = replace(DENSE, affected=0.0, reward=0.75)
    headings, rows = evaluation_cells({"after": [dense, lost]})
    assert headings[2:4] == ["Accuracy", "Reward"]
    assert [row[2:6] for row in rows] == [
        ["0.750", "0.750", "2.00 KiB", "100%"],
        ["0.500", "0.250", "512 B", "25%"],
    ]
    text = shown(summary_table([], [unknown, replace(lost, learned_reward=1.0)], {}))
    assert max(map(len, text.splitlines())) <= 80


def test_the_terminal_says_what_the_brackets_are():
    console = Console(width=120, file=StringIO())
    console.print(score_table([(DENSE, FOUND)], 0.9))
    assert "[low, high] is the 90% interval over prompts" in console.file.getvalue()
    for cell in (
        "0.750 [0.500, 1.000]",
        "0.500 [-0.250, 1.250]",
        "0.875 [0.625, 1.000]",
        "5.5 [5.0, 6.0]",
        "2.00 KiB",
    ):
        assert cell in console.file.getvalue()


def test_cells_cannot_end_their_table():
    text = markdown_table(["a", "b"], [["x|y", "a\nb"], [0.123456, None]])
    assert text.splitlines() == ["| a | b |", "| --- | --- |", "| x&#124;y | a<br>b |", "| 0.1235 | – |"]
