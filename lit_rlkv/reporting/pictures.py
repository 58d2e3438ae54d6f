"""Pictures of a report, each with a name and a caption on how to read it."""

from collections.abc import Iterator

from lit_rlkv.reporting.plots import curves, divergence, kept_keys, style
from lit_rlkv.reporting.report import Picture, RunReport
from lit_rlkv.reporting.tables import reward_sentence
from lit_rlkv.units import human_seconds


def figures(report: RunReport) -> list[Picture]:
    """Return all pictures for which the run has data."""
    parts = (_result_pictures, _eviction_pictures, _cache_pictures, _time_pictures)
    return [picture for pictures in parts for picture in pictures(report)]


def _result_pictures(report: RunReport) -> Iterator[Picture]:
    history, quality = report.history, report.reward_model
    if _is_logged(report, "reward"):
        yield Picture(
            curves.reward_curve(history),
            "Reward",
            "The thick line is the moving average of the mean reward of rollouts. The band is the std of "
            "rewards among responses to one prompt; at 0 there is no learning signal.",
        )
    if _is_logged(report, "rewards/learned"):
        yield Picture(
            curves.proxy_and_gold(history),
            "Proxy and gold",
            "If the learned reward rises and the verifier's score does not, the policy exploits the reward "
            "model.",
        )
    if quality is not None:
        yield Picture(
            curves.reliability(quality.bin_confidence, quality.bin_accuracy, quality.bin_counts),
            "How sure the reward model should be",
            f"{reward_sentence(quality)}. Below the diagonal on the right it is overconfident.",
        )
    if report.before or report.after:
        yield Picture(
            curves.accuracy_against_budget(report.before, report.after),
            "Accuracy against budget",
            "The distance from a point up to the dashed line of its colour is the cost of eviction.",
        )
    if _is_logged(report, *curves.MISMATCHES):
        yield Picture(
            curves.mismatch(history),
            "Mismatch of sampler and learner",
            "Lower is better on every line. A replay gap far below the other lines means exact replay.",
        )


def _eviction_pictures(report: RunReport) -> Iterator[Picture]:
    if mismatches := report.measured("mismatch"):
        last = mismatches[-1]
        when = f"In iteration {last['iteration']}"
        yield Picture(
            divergence.mismatch_by_position(last),
            "Mismatch by position",
            f"{when}: distance of the sampler from a policy that sees every key. It starts where keys are "
            "first evicted. A high percentile far above the mean means that few tokens carry it.",
        )
        yield Picture(
            divergence.overlap_by_position(last),
            "Overlap by position",
            f"{when}: the probability that both distributions give to the same tokens. Where the 5th "
            "percentile falls to 0, the dense policy would not sample some of the responses.",
        )
        yield Picture(
            divergence.weights_by_position(last),
            "Why reweighting explodes with length",
            f"{when}: the weight of a response is a product over its tokens, so the spread of its log grows "
            "with the length. The left axis is the effective share of the responses so far.",
        )
    if layers := report.measured("layers"):
        yield Picture(
            divergence.layer_mismatch(layers[0], layers[-1]),
            "Which layer's eviction matters",
            "A bar is the effect of the evictions of one layer alone; the dashed line is the effect of all "
            "layers together.",
        )
    if _is_logged(report, "kv/arms/tis/ess"):
        yield Picture(
            curves.effective_samples(report.history),
            "What each correction would make of the rollouts",
            "Left: effective share of the response tokens after weighting. Right: share of tokens that are "
            "rejected or have a clipped weight. Replay needs no weights.",
        )


def _cache_pictures(report: RunReport) -> Iterator[Picture]:
    if report.rollout is not None:
        longest = int(report.rollout.attention_mask.sum(dim=1).argmax())  # it has the most evictions
        yield Picture(
            kept_keys.cache_fill(report.rollout, report.budget, report.interval),
            "Cache fill",
            "The cache fills up to its slots and is compacted to its budget; a dense cache, the dashed line, "
            "grows with the text. The prompt is read before any key is evicted.",
        )
        yield Picture(
            kept_keys.key_lifetimes(report.rollout, longest, _labels(report, longest)),
            "Key lifetimes in one sequence",
            "A bar is one key, from its own token to the first query that no longer sees it. Compare panels "
            "to see which heads keep keys that others evict.",
        )
    if retained := report.measured("cache"):
        last = retained[-1]
        when = f"In iteration {last['iteration']}"
        yield Picture(
            kept_keys.attention_kept(last),
            "Attention that eviction left",
            f"{when}: share of each head's dense attention that is on cached keys; on the right for the "
            "queries with the lowest share.",
        )
        yield Picture(
            kept_keys.attention_on_evicted(last),
            "Evicted and later needed",
            f"{when}: attention of the dense policy on evicted keys; near 0, eviction removed only keys that "
            "are not used.",
        )
        yield Picture(
            kept_keys.ages_at_eviction(last),
            "Age of keys at their eviction",
            f"{when}: a policy that keeps recent keys evicts at one age; a head with a high median keeps old "
            "keys.",
        )


def _time_pictures(report: RunReport) -> Iterator[Picture]:
    if report.stage_seconds:
        total = human_seconds(sum(report.stage_seconds.values()))
        caption = f"Each bar is the wall-clock time of one stage; {total} in all."
        yield Picture(curves.time_per_stage(report.stage_seconds), "Time per stage", caption)
    if not _is_logged(report, "time/rollout"):
        return
    yield Picture(
        curves.time_per_phase(report.history),
        "Time per phase",
        "Time of each phase of an iteration, with the time of diagnostics on top.",
    )
    if _is_logged(report, *(f"memory/rollout/{kind}" for kind in curves.MEMORY)):
        yield Picture(
            curves.memory_per_phase(report.history),
            "Memory per phase",
            "Peak memory of each phase, including earlier allocations. A line that rises is a leak, or "
            "responses that grow.",
        )


def _is_logged(report: RunReport, *metrics: str) -> bool:
    return any(len(style.series(report.history, metric)[0]) for metric in metrics)


def _labels(report: RunReport, row: int) -> list[str] | None:
    """Return the token labels of a row of the rollout, without padding."""
    if report.token_labels is None or report.rollout is None:
        return None
    input_ids = report.rollout.input_ids[row][report.rollout.attention_mask[row]].tolist()
    return [report.token_labels.get(id_, "?") for id_ in input_ids]
