"""Pictures of what eviction does to the policy: where it moves it, and what reweighting would cost."""

from lit_rlkv.reporting import plots
from lit_rlkv.reporting.report.content import RunReport
from lit_rlkv.reporting.report.picture import Picture


def of_eviction(report: RunReport) -> list[Picture]:
    """Of the last measurement of each diagnostic, where there is one."""
    return [*_by_position(report), *_by_layer(report), *_of_arms(report)]


def _by_position(report: RunReport) -> list[Picture]:
    rows = report.measured("mismatch")
    if not rows:
        return []
    last = rows[-1]
    when = f"In iteration {last['iteration']}"
    return [
        Picture(
            plots.mismatch_by_position(last),
            "Mismatch by position",
            f"{when}: how far the sampler is from a policy that sees every key; it sets in where keys are "
            "first evicted, and a high percentile far above the mean says that few tokens carry it.",
        ),
        Picture(
            plots.overlap_by_position(last),
            "Overlap by position",
            f"{when}: the probability that both distributions give to the same tokens; where the 5th "
            "percentile falls to 0, some responses go where the dense policy never would.",
        ),
        Picture(
            plots.weights_by_position(last),
            "Why reweighting explodes with length",
            f"{when}: the weight of a response is a product over its tokens, so its log wanders off as the "
            "response grows, and of all responses so far only the share on the left still counts.",
        ),
    ]


def _by_layer(report: RunReport) -> list[Picture]:
    rows = report.measured("layers")
    if not rows:
        return []
    return [
        Picture(
            plots.layer_mismatch(rows[0], rows[-1]),
            "Which layer's eviction matters",
            "A bar is what the evictions of one layer alone would do to the policy; a bar as high as the "
            "dashed line does as much damage as all layers together.",
        )
    ]


def _of_arms(report: RunReport) -> list[Picture]:
    if len(plots.series(report.history, "kv/arms/tis/ess")[0]) == 0:
        return []
    return [
        Picture(
            plots.effective_samples(report.history),
            "What each correction would make of the rollouts",
            "The share of the actions that would still count once they are weighted, and the share that "
            "would be thrown away or weighted by less than is right; replay needs neither.",
        )
    ]
