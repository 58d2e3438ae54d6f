from dataclasses import replace
from io import StringIO

from rich.console import Console

from lit_rlkv.diagnostics.bootstrap import Estimate
from lit_rlkv.evaluation.estimates import Estimates
from lit_rlkv.reporting.scores import cost_cells, score_cells, score_table
from lit_rlkv.types import EvalRow

DENSE = EvalRow("dense", None, 0.75, 8, 5.5, 2048, 0.0, 1e-7)
SPARSE = EvalRow("snapkv 7+2", 7, 0.5, 8, 6.0, 512, 0.0123, 2e-7)
FOUND = Estimates(
    accuracy=Estimate(0.75, 0.5, 1.0),
    mean_length=Estimate(5.5, 5.0, 6.0),
    pass_at_k={1: Estimate(0.75, 0.5, 1.0), 4: Estimate(0.875, 0.625, 1.0)},
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
