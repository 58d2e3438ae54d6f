"""The pictures of a report, each with its name and one sentence on how to read it."""

from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from lit_rlkv.reporting import plots
from lit_rlkv.reporting.report.content import RunReport
from lit_rlkv.reporting.report.eviction import of_eviction
from lit_rlkv.reporting.report.phases import of_phases
from lit_rlkv.reporting.report.picture import Picture
from lit_rlkv.reporting.report.retention import of_retention
from lit_rlkv.reporting.summary import reward_sentence
from lit_rlkv.types import Rollout
from lit_rlkv.units import human_seconds


def figures(report: RunReport) -> list[Picture]:
    """Each picture that the run has data for."""
    return [
        *_of_reward(report),
        *_of_evaluation(report),
        *_of_mismatch(report),
        *of_eviction(report),
        *_of_cache(report),
        *of_retention(report),
        *_of_time(report),
        *of_phases(report),
    ]


def _of_reward(report: RunReport) -> list[Picture]:
    shown = []
    if _is_logged(report.history, ["reward"]):
        shown.append(
            Picture(
                plots.reward_curve(report.history),
                "Reward",
                "The thick line is the trend of what rollouts scored during training; the band is how far "
                "responses to one prompt differ, and where it vanishes there is nothing left to learn from.",
            )
        )
    if _is_logged(report.history, ["rewards/learned"]):
        shown.append(
            Picture(
                plots.proxy_and_gold(report.history),
                "Proxy and gold",
                "The policy climbs the reward model's opinion; where the verifier's score does not follow, "
                "it has learned to please the reward model and no more.",
            )
        )
    judged = report.reward_model
    if judged is not None:
        shown.append(
            Picture(
                plots.reliability(judged.bin_confidence, judged.bin_accuracy, judged.bin_counts),
                "How sure the reward model should be",
                f"{reward_sentence(judged)}; below the diagonal on the right it is surer than it should be.",
            )
        )
    return shown


def _of_evaluation(report: RunReport) -> list[Picture]:
    if not report.before and not report.after:
        return []
    return [
        Picture(
            plots.accuracy_against_budget(report.before, report.after),
            "Accuracy against budget",
            "The distance from a point up to the dashed line of its colour is what eviction costs there.",
        )
    ]


def _of_mismatch(report: RunReport) -> list[Picture]:
    if not _is_logged(report.history, plots.MISMATCHES):
        return []
    return [
        Picture(
            plots.mismatch(report.history),
            "Mismatch of sampler and learner",
            "Lower is better on every line, and a replay gap far below the rest means that the learner "
            "saw exactly what the sampler saw.",
        )
    ]


def _of_cache(report: RunReport) -> list[Picture]:
    if report.rollout is None:
        return []
    return [
        Picture(
            plots.cache_fill(report.rollout, report.budget, report.interval),
            "Cache fill",
            "The cache fills up to its slots and falls back to its budget, while a dense cache, the "
            "dashed line, grows with the text; the prompt is read before any key is evicted.",
        ),
        Picture(
            _lifetimes(report.rollout, report.token_labels),
            "Key lifetimes in one sequence",
            "A bar is one key, from its own token to the query that first misses it: compare panels to "
            "see which head still holds what another has lost.",
        ),
    ]


def _of_time(report: RunReport) -> list[Picture]:
    if not report.stage_seconds:
        return []
    total = human_seconds(sum(report.stage_seconds.values()))
    caption = f"Each bar is the wall-clock time of one stage; {total} in all."
    return [Picture(plots.time_per_stage(report.stage_seconds), "Time per stage", caption)]


def _is_logged(history: plots.History, metrics: Iterable[str]) -> bool:
    return any(len(plots.series(history, metric)[0]) for metric in metrics)


def _lifetimes(rollout: Rollout, token_labels: Mapping[int, str] | None) -> Figure:
    """Of the longest sequence, where the most is evicted."""
    row = int(rollout.attention_mask.sum(dim=1).argmax())
    if token_labels is None:
        return plots.key_lifetimes(rollout, row)
    input_ids = rollout.input_ids[row][rollout.attention_mask[row]].tolist()
    return plots.key_lifetimes(rollout, row, [token_labels.get(id_, "?") for id_ in input_ids])
