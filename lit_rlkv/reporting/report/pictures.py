"""Pictures of a report, each with a name and a caption on how to read it."""

from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import accuracy, curves, divergence, kept_keys, style, time_and_memory
from lit_rlkv.reporting.report.content import Picture, RunReport
from lit_rlkv.reporting.tables import reward_sentence
from lit_rlkv.types import Rollout
from lit_rlkv.units import human_seconds


def figures(report: RunReport) -> list[Picture]:
    """Return all pictures for which the run has data."""
    return [
        *_reward_pictures(report),
        *_evaluation_pictures(report),
        *_mismatch_pictures(report),
        *_position_pictures(report),
        *_layer_pictures(report),
        *_correction_pictures(report),
        *_cache_pictures(report),
        *_retention_pictures(report),
        *_stage_pictures(report),
        *_phase_pictures(report),
    ]


def _reward_pictures(report: RunReport) -> list[Picture]:
    shown = []
    if _is_logged(report.history, ["reward"]):
        shown.append(
            Picture(
                curves.reward_curve(report.history),
                "Reward",
                "The thick line is the trend of what rollouts scored during training; the band is how far "
                "responses to one prompt differ, and where it vanishes there is nothing left to learn from.",
            )
        )
    if _is_logged(report.history, ["rewards/learned"]):
        shown.append(
            Picture(
                curves.proxy_and_gold(report.history),
                "Proxy and gold",
                "The policy climbs the reward model's opinion; where the verifier's score does not follow, "
                "it has learned to please the reward model and no more.",
            )
        )
    quality = report.reward_model
    if quality is not None:
        shown.append(
            Picture(
                accuracy.reliability(quality.bin_confidence, quality.bin_accuracy, quality.bin_counts),
                "How sure the reward model should be",
                f"{reward_sentence(quality)}; below the diagonal on the right it is surer than it should be.",
            )
        )
    return shown


def _evaluation_pictures(report: RunReport) -> list[Picture]:
    if not report.before and not report.after:
        return []
    return [
        Picture(
            accuracy.accuracy_against_budget(report.before, report.after),
            "Accuracy against budget",
            "The distance from a point up to the dashed line of its colour is what eviction costs there.",
        )
    ]


def _mismatch_pictures(report: RunReport) -> list[Picture]:
    if not _is_logged(report.history, curves.MISMATCHES):
        return []
    return [
        Picture(
            curves.mismatch(report.history),
            "Mismatch of sampler and learner",
            "Lower is better on every line, and a replay gap far below the rest means that the learner "
            "saw exactly what the sampler saw.",
        )
    ]


def _cache_pictures(report: RunReport) -> list[Picture]:
    if report.rollout is None:
        return []
    return [
        Picture(
            kept_keys.cache_fill(report.rollout, report.budget, report.interval),
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


def _stage_pictures(report: RunReport) -> list[Picture]:
    if not report.stage_seconds:
        return []
    total = human_seconds(sum(report.stage_seconds.values()))
    caption = f"Each bar is the wall-clock time of one stage; {total} in all."
    return [Picture(time_and_memory.time_per_stage(report.stage_seconds), "Time per stage", caption)]


def _is_logged(history: style.History, metrics: Iterable[str]) -> bool:
    return any(len(style.series(history, metric)[0]) for metric in metrics)


def _lifetimes(rollout: Rollout, token_labels: Mapping[int, str] | None) -> Figure:
    """Draw the lifetimes of the longest sequence, which has the most evictions."""
    row = int(rollout.attention_mask.sum(dim=1).argmax())
    if token_labels is None:
        return kept_keys.key_lifetimes(rollout, row)
    input_ids = rollout.input_ids[row][rollout.attention_mask[row]].tolist()
    return kept_keys.key_lifetimes(rollout, row, [token_labels.get(id_, "?") for id_ in input_ids])


def _position_pictures(report: RunReport) -> list[Picture]:
    rows = report.measured("mismatch")
    if not rows:
        return []
    last = rows[-1]
    when = f"In iteration {last['iteration']}"
    return [
        Picture(
            divergence.mismatch_by_position(last),
            "Mismatch by position",
            f"{when}: how far the sampler is from a policy that sees every key; it sets in where keys are "
            "first evicted, and a high percentile far above the mean says that few tokens carry it.",
        ),
        Picture(
            divergence.overlap_by_position(last),
            "Overlap by position",
            f"{when}: the probability that both distributions give to the same tokens; where the 5th "
            "percentile falls to 0, some responses go where the dense policy never would.",
        ),
        Picture(
            divergence.weights_by_position(last),
            "Why reweighting explodes with length",
            f"{when}: the weight of a response is a product over its tokens, so its log wanders off as the "
            "response grows, and of all responses so far only the share on the left still counts.",
        ),
    ]


def _layer_pictures(report: RunReport) -> list[Picture]:
    rows = report.measured("layers")
    if not rows:
        return []
    return [
        Picture(
            divergence.layer_mismatch(rows[0], rows[-1]),
            "Which layer's eviction matters",
            "A bar is what the evictions of one layer alone would do to the policy; a bar as high as the "
            "dashed line does as much damage as all layers together.",
        )
    ]


def _correction_pictures(report: RunReport) -> list[Picture]:
    if len(style.series(report.history, "kv/arms/tis/ess")[0]) == 0:
        return []
    return [
        Picture(
            curves.effective_samples(report.history),
            "What each correction would make of the rollouts",
            "The share of response tokens that would still count once they are weighted, and the share that "
            "would be thrown away or weighted by less than is right; replay needs neither.",
        )
    ]


def _retention_pictures(report: RunReport) -> list[Picture]:
    """Return the pictures of the last cache measurement."""
    rows = report.measured("cache")
    if not rows:
        return []
    last = rows[-1]
    when = f"In iteration {last['iteration']}"
    return [
        Picture(
            kept_keys.attention_kept(last),
            "Attention that eviction left",
            f"{when}: of what each head of the policy looks at when it sees every key, the share that the "
            "cache still held; on the right for the queries that lost most.",
        ),
        Picture(
            kept_keys.attention_on_evicted(last),
            "Evicted and later needed",
            f"{when}: the attention that the dense policy gives to keys that were gone; where it stays near "
            "0, eviction took what nobody reads.",
        ),
        Picture(
            kept_keys.ages_at_eviction(last),
            "Age of keys at their eviction",
            f"{when}: a policy that keeps what is recent evicts at one age; a head whose median is high "
            "holds on to what it has.",
        ),
    ]


def _phase_pictures(report: RunReport) -> list[Picture]:
    """Return the pictures of time and memory per phase."""
    if len(style.series(report.history, "time/rollout")[0]) == 0:
        return []
    shown = [
        Picture(
            time_and_memory.time_per_phase(report.history),
            "Time per phase",
            "Where an iteration spends its time; diagnostics stand on top, where they measured.",
        )
    ]
    if time_and_memory.has_memory(report.history):
        shown.append(
            Picture(
                time_and_memory.memory_per_phase(report.history),
                "Memory per phase",
                "The most that each phase held, what lay there before it included; a line that climbs is a "
                "leak, or responses that grow.",
            )
        )
    return shown
