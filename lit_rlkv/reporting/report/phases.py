"""Pictures of the time and the memory that the phases of an iteration took."""

from lit_rlkv.reporting import plots
from lit_rlkv.reporting.report.content import RunReport
from lit_rlkv.reporting.report.picture import Picture


def of_phases(report: RunReport) -> list[Picture]:
    """Of the iterations in which they were measured, if there are any."""
    if len(plots.series(report.history, "time/rollout")[0]) == 0:
        return []
    shown = [
        Picture(
            plots.time_per_phase(report.history),
            "Time per phase",
            "Where an iteration spends its time; diagnostics stand on top, where they measured.",
        )
    ]
    if plots.has_memory(report.history):
        shown.append(
            Picture(
                plots.memory_per_phase(report.history),
                "Memory per phase",
                "The most that each phase held, what lay there before it included; a line that climbs is a "
                "leak, or responses that grow.",
            )
        )
    return shown
