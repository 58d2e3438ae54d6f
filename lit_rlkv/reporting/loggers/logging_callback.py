"""Callback that sends metrics, samples and figures of a run to its logger."""

from collections.abc import Callable, Sequence

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.experience.batch import Experience
from lit_rlkv.reporting.loggers import GuardedLogger
from lit_rlkv.reporting.loggers.base import Rows, RunLogger
from lit_rlkv.reporting.report import Picture
from lit_rlkv.reporting.run_metrics import ITERATION, SECONDS, TOKENS, AxisValues, History, last_axis_values
from lit_rlkv.reporting.samples import LoggedSample, Samples, read_samples
from lit_rlkv.types import Rollout

SAMPLE_HEADINGS = ("iteration", "prompt", "completion", "reward")
N_DRAWN = 16
"""Sequences of a rollout in the figures during training."""


class LoggingCallback(RLCallback):
    """Logs metrics, samples and figures; must come after all callbacks that add metrics.

    Args:
        history: rows of metrics.csv from before a resume; rows that the logger lacks are sent again.
        draw: returns the figures of the run so far, given a rollout.
    """

    def __init__(
        self,
        logger: GuardedLogger,
        samples: Samples,
        history: History,
        draw: Callable[[Rollout], Sequence[Picture]],
    ) -> None:
        self.logger = logger
        self.samples = samples
        self.draw = draw
        self._rollout: Rollout | None = None
        """The rollout of this iteration if figures are due."""
        if history:
            earlier = list(history)
            logger.send("the earlier iterations", lambda logger: self._send_missing(logger, earlier))

    def on_rollout_end(self, experience: Experience) -> None:
        every = self.logger.figures_every
        is_due = every is not None and (experience.iteration + 1) % every == 0
        self._rollout = experience.rollout.rows(slice(N_DRAWN)).to("cpu") if is_due else None

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        place = {ITERATION: float(iteration), TOKENS: metrics[TOKENS], SECONDS: metrics[SECONDS]}
        self.logger.send("an iteration", lambda logger: self._record(logger, metrics, place))
        self._rollout = None

    def _record(self, logger: RunLogger, metrics: dict[str, float], place: AxisValues) -> None:
        iteration = int(place[ITERATION])
        if iteration <= logger.last_iteration:
            return
        logger.scalars(metrics, place)
        drawn = [sample for sample in self.samples.latest if sample.iteration == iteration]
        if drawn:
            logger.table("samples", SAMPLE_HEADINGS, sample_rows(drawn), place, grows=True)
        if self._rollout is not None:
            logger.figures(self.draw(self._rollout), place)

    def _send_missing(self, logger: RunLogger, history: History) -> None:
        """Send rows after the logger's last iteration, and samples missing from its table."""
        for n_rows, row in enumerate(history, start=1):
            if row[ITERATION] > logger.last_iteration:
                logger.scalars(row, last_axis_values(history[:n_rows]))
        n_known = max(logger.last_iteration, int(history[-1][ITERATION]))
        n_kept = logger.last_iteration if logger.keeps_tables else 0
        known = [s for s in read_samples(self.samples.path) if n_kept < s.iteration <= n_known]
        if known:
            logger.table(
                "samples", SAMPLE_HEADINGS, sample_rows(known), last_axis_values(history), grows=True
            )


def sample_rows(samples: Sequence[LoggedSample]) -> Rows:
    """Return rows with the columns of SAMPLE_HEADINGS."""
    return [[sample.iteration, sample.prompt, sample.completion, sample.reward] for sample in samples]
