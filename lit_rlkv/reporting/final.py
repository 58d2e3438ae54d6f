"""The numbers that a run is judged by at its end, under one name each for every reader."""

from collections.abc import Sequence

from lit_rlkv.types import EvalRow

FINAL_METRICS = (
    "eval/accuracy",
    "eval/dense_accuracy",
    "eval/accuracy_gain",
    "eval/dense_accuracy_gain",
    "eval/kl",
    "eval/kv_bytes",
    "eval/learned_reward",
)
"""All that `final_metrics` may find, in its order."""


def final_metrics(
    before: Sequence[EvalRow], after: Sequence[EvalRow], budget: int | None
) -> dict[str, float]:
    """What the evaluation at the end of a run found; empty where there was none.

    `eval/accuracy`, `eval/kl`, `eval/kv_bytes` and `eval/learned_reward` are under the run's own cache,
    `eval/dense_accuracy` with all keys; a gain is the accuracy after training less the one before, and stands
    only where both were measured.

    Args:
        budget: of the run's own cache; None where it keeps all keys.
    """
    found: dict[str, float] = {}
    own, dense = _row(after, budget), _row(after, None)
    if own is not None:
        found |= {"eval/accuracy": own.accuracy, "eval/kl": own.kl, "eval/kv_bytes": float(own.kv_bytes)}
        if own.learned_reward is not None:
            found["eval/learned_reward"] = own.learned_reward
    if dense is not None:
        found["eval/dense_accuracy"] = dense.accuracy
    for name, row, earlier in (
        ("eval/accuracy_gain", own, _row(before, budget)),
        ("eval/dense_accuracy_gain", dense, _row(before, None)),
    ):
        if row is not None and earlier is not None:
            found[name] = row.accuracy - earlier.accuracy
    return {name: found[name] for name in FINAL_METRICS if name in found}


def _row(rows: Sequence[EvalRow], budget: int | None) -> EvalRow | None:
    return next((row for row in rows if row.budget == budget), None)
