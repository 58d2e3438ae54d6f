"""Pictures of what a cache kept: what the dense policy would still have read, and how long keys lived."""

from lit_rlkv.reporting import plots
from lit_rlkv.reporting.report.content import RunReport
from lit_rlkv.reporting.report.picture import Picture


def of_retention(report: RunReport) -> list[Picture]:
    """Of the last measurement in which anything was evicted, if there is one."""
    rows = report.measured("cache")
    if not rows:
        return []
    last = rows[-1]
    when = f"In iteration {last['iteration']}"
    return [
        Picture(
            plots.attention_kept(last),
            "Attention that eviction left",
            f"{when}: of what each head of the policy looks at when it sees every key, the share that the "
            "cache still held; on the right for the queries that lost most.",
        ),
        Picture(
            plots.attention_on_dead(last),
            "Evicted and later needed",
            f"{when}: the attention that the dense policy gives to keys that were gone; where it stays near "
            "0, eviction took what nobody reads.",
        ),
        Picture(
            plots.ages_at_eviction(last),
            "Age of keys at their eviction",
            f"{when}: a policy that keeps what is recent evicts at one age; a head whose median is high "
            "holds on to what it has.",
        ),
    ]
