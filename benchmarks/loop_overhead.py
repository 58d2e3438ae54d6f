"""Time of an iteration beyond rollout, scoring, reward and update: seconds by part and callback.

    python benchmarks/loop_overhead.py [--iterations 60] [override ...]   on a machine that does nothing else

A run of `python -m lit_rlkv.fit` with its callbacks, diagnostics, logger and checkpoints (any overrides; by
default the default run on one thread), each of whose parts stops the clock of what it is called from: a
callback in an update counts as a callback and not as the update. Means over all iterations but the first, so
that what happens every tenth iteration counts a tenth. `loader` is what else happens until there is a batch:
the next problems, credit. `rest` is all that is left: the loop itself, and its logging.
Rows go to benchmarks/results/loop_overhead.jsonl.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import command_line
import record
from rich.console import Console
from text_table import text_table

from lit_rlkv.callbacks.hooks import HOOKS, RLCallback
from lit_rlkv.config import Config, composed
from lit_rlkv.interrupts import Interruption
from lit_rlkv.run_files import CHECKPOINTS
from lit_rlkv.runs.checkpoint import CheckpointDir
from lit_rlkv.runs.context import build_context
from lit_rlkv.runs.launch import make_fabric
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.starting_model import find_starting_model
from lit_rlkv.runs.training_run import TrainingRun
from lit_rlkv.stages.rl import train_policy
from lit_rlkv.stages.sft import run_sft

PHASES = ("rollout", "score", "reward", "update")
CHECKPOINT, LOADER, REST = "checkpoint", "loader", "rest"


class Clock:
    """Seconds by part; a part within another one stops its clock."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._now = now
        self._parts: list[str] = []
        self._since = now()

    def start(self, part: str) -> None:
        self._count()
        self._parts.append(part)

    def stop(self) -> None:
        self._count()
        self._parts.pop()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self.start(part)
        yield
        self.stop()

    def read(self) -> dict[str, float]:
        self._count()
        return {REST: 0.0, **self.seconds}

    def _count(self) -> None:
        now = self._now()
        self.seconds[self._parts[-1] if self._parts else REST] += now - self._since
        self._since = now


class Timed(RLCallback):
    """A callback whose hooks are counted under its name; what it adds to the loss belongs to the update."""

    def __init__(self, inner: RLCallback, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock
        self.loss_terms = inner.loss_terms  # type: ignore[method-assign]


def _timed(hook: str) -> Callable[..., None]:
    def call(self: Timed, *arguments: Any) -> None:
        with self.clock(type(self.inner).__name__):
            getattr(self.inner, hook)(*arguments)

    return call


for _hook in HOOKS:
    setattr(Timed, _hook, _timed(_hook))


class Marks(RLCallback):
    """Counts the phases, and forgets the first iteration; stands before all other callbacks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.n_iterations = -1
        self.found: dict[str, float] = {}
        """Seconds by part of all iterations but the first."""
        self._loader_s = 0.0
        self._known_s = 0.0

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if phase == "rollout":
            self._known_s = -self._counted_s()
        elif phase == "update":
            self._known_s += self._counted_s()
        self.clock.start(phase)

    def on_phase_end(self, phase: str, iteration: int) -> None:
        self.clock.stop()

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self._loader_s += metrics["time/data"] - self._known_s
        self.found = self.clock.read() | {LOADER: self._loader_s}
        self.found[REST] -= self._loader_s
        self.n_iterations += 1
        if self.n_iterations == 0:
            self.clock.seconds.clear()
            self._loader_s = 0.0

    def _counted_s(self) -> float:
        return sum(seconds for part, seconds in self.clock.read().items() if part != REST)


class TimedCheckpoints(CheckpointDir):
    """Checkpoints whose writing is counted."""

    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root)
        self.clock = clock

    def save(self, *arguments: Any) -> Path:
        with self.clock(CHECKPOINT):
            return super().save(*arguments)


def measure(cfg: Config, run_dir: Path) -> tuple[dict[str, float], int]:
    """Seconds by part of the iterations of a run but the first, and how many these were."""
    context = build_context(cfg, make_fabric(cfg))
    start = find_starting_model(cfg, run_dir) or run_sft(context, [])
    clock = Clock()
    marks = Marks(clock)
    run_dir.mkdir(parents=True, exist_ok=True)
    run = TrainingRun(context, run_dir, Console(quiet=True), Interruption())
    checkpoints = TimedCheckpoints(run_dir / CHECKPOINTS, clock)
    with run.open():
        module = make_policy(context, start)
        callbacks = [Timed(one, clock) for one in run.callbacks()]
        train_policy(context, module, [marks, *callbacks], checkpoints, None)
    return marks.found, marks.n_iterations


def table(seconds: dict[str, float]) -> str:
    """Parts in the order of their time, the phases first."""
    total = sum(seconds.values())
    others = sorted(seconds.keys() - set(PHASES), key=lambda part: -seconds[part])
    rows = [
        [part, f"{1e3 * seconds[part]:.2f}", f"{seconds[part] / total:.2%}"]
        for part in (*(phase for phase in PHASES if phase in seconds), *others)
    ]
    return text_table(["part", "ms per iteration", "share"], [*rows, ["all", f"{1e3 * total:.2f}", ""]])


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--no-record", action="store_true", help="print alone")
    args, overrides = parser.parse_known_args()
    settings = [f"algorithm.n_iterations={args.iterations}", "stages=[sft,rl]", "fabric.n_threads=1"]
    cfg = composed("config", [*settings, *overrides])
    del cfg.hydra
    cfg = checked_config(cfg)
    with tempfile.TemporaryDirectory() as name:
        found, n_iterations = measure(cfg, Path(name) / "run")
    seconds = {part: value / n_iterations for part, value in found.items()}
    beyond = sum(value for part, value in seconds.items() if part not in PHASES)
    print(table(seconds))
    print(f"beyond the phases: {1e3 * beyond:.2f} ms of an iteration, {beyond / sum(seconds.values()):.2%}")
    if not args.no_record:
        row = {"overrides": overrides, "n_iterations": n_iterations, "seconds": seconds}
        record.append("loop_overhead", row)


if __name__ == "__main__":
    main()
