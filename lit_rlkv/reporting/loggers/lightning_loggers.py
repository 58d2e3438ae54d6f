"""Lightning's loggers: any for config and metrics, TensorBoard also for figures and tables."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lit_rlkv.reporting.loggers import Rows, RunLogger, RunStart
from lit_rlkv.reporting.pictures import Picture
from lit_rlkv.reporting.plots.style import pixels
from lit_rlkv.reporting.run_metrics import ITERATION, AxisValues
from lit_rlkv.reporting.tables import markdown_table
from lit_rlkv.settings import PositiveInt, Text, dataclass


def as_run_logger(built: Any) -> RunLogger:
    """Return a configured logger as a RunLogger.

    Raises:
        TypeError: it is neither a RunLogger nor a Lightning logger.
    """
    if isinstance(built, RunLogger):
        return built
    if isinstance(built, Logger):
        return LightningLogger(built)
    raise TypeError(f"logger must be a RunLogger or a Lightning logger, got {type(built).__name__}")


class LightningLogger(RunLogger):
    """Logs config, environment and metrics to a Lightning logger; the step is the iteration."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def open(self, start: RunStart) -> str | None:
        self.logger.log_hyperparams({**start.config, "environment": dict(start.environment)})
        self.last_iteration = start.resumed_at
        return None

    def scalars(self, metrics: Mapping[str, float | int], place: AxisValues) -> None:
        numbers = {name: float(value) for name, value in {**metrics, **place}.items()}
        self.logger.log_metrics(numbers, step=int(place[ITERATION]))
        self.logger.save()  # so that a kill loses no metrics

    def close(self, is_complete: bool) -> str | None:
        self.logger.finalize("success" if is_complete else "failed")
        return None


FOLDER = "tensorboard"
"""Folder of the event files, in the run's folder."""
COMPARED = ("reward", "eval/accuracy", "eval/dense_accuracy", "eval/accuracy_gain")
"""Metrics whose last values stand beside the settings of each run in TensorBoard's HPARAMS tab."""


@dataclass(eq=False)
class TensorBoard(LightningLogger):
    """Event files in the run's folder; a resumed run hides events after its checkpoint.

    Raises:
        ValueError: the package is not installed, or an argument is invalid.
    """

    name: Text | None = None
    """folder of the event files in `tensorboard`, which TensorBoard shows; null: that folder itself"""
    figures_every: PositiveInt | None = None
    """iterations between figures; null: at the end only"""

    def __post_init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ValueError(
                "logger=tensorboard needs the package tensorboard, which is not installed; "
                'pip install -e ".[tensorboard]", or use logger=csv'
            )
        if self.name is not None and (self.name in (".", "..") or "/" in self.name):
            raise ValueError(f"name must be the name of a folder, got {self.name!r}; leave out slashes")
        self._compared: dict[str, float] = {}

    def open(self, start: RunStart) -> str | None:
        self.logger = TensorBoardLogger(
            save_dir=start.run_dir,
            name=FOLDER,
            version=self.name or "",
            default_hp_metric=False,
            purge_step=start.resumed_at + 1,  # also after a kill before the first checkpoint
        )
        super().open(start)
        self.writer, self._config = self.logger.experiment, start.config
        described = json.dumps(dict(start.environment), indent=1, default=str)
        self.writer.add_text("environment", f"```\n{described}\n```", start.resumed_at)
        return f"to watch: tensorboard --logdir {self.logger.log_dir}"

    def scalars(self, metrics: Mapping[str, float | int], place: AxisValues) -> None:
        super().scalars(metrics, place)
        self._compared |= {f"hparams/{name}": float(metrics[name]) for name in COMPARED if name in metrics}
        self._last_step = int(place[ITERATION])

    def close(self, is_complete: bool) -> str | None:
        if is_complete and self._compared:
            self.logger.log_hyperparams(dict(self._config), self._compared, self._last_step)
        return super().close(is_complete)

    def table(self, name: str, headings: Sequence[str], rows: Rows, place: AxisValues) -> None:
        self.writer.add_text(name, markdown_table(headings, rows), int(place[ITERATION]))

    def figures(self, pictures: Sequence[Picture], place: AxisValues) -> None:
        for picture in pictures:
            image = pixels(picture.figure)
            self.writer.add_image(picture.key, image, int(place[ITERATION]), dataformats="HWC")
