"""Signals that ask a run to stop: Ctrl-C at once; of a scheduler after it has saved its state."""

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import cast

import torch
from lightning.fabric import Fabric
from omegaconf import OmegaConf
from torch import Tensor

from lit_rlkv import interrupts
from lit_rlkv.config import quoted
from lit_rlkv.config.targets import user_code
from lit_rlkv.interrupts import REQUEUE, SIGNALS
from lit_rlkv.runs.context import CONFIG
from lit_rlkv.trust import KEY, trusted_modules

INTERRUPTED = ".interrupted"
"""File in a run that a signal ended after it had saved itself; removed when the run is resumed."""


class InterruptedRunError(BaseException):
    """A signal asked the run to end. Not an `Exception`: code that survives failures must not catch it."""

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.is_ctrl_c = number == signal.SIGINT
        """True if a person ended the run, False if a scheduler did, which starts it again."""


class Interruption:
    """A request by a signal to end the run, handled at once or, inside `deferred` or `together`, later.

    Ctrl-C does not wait for the end of `deferred`: nobody wants to sit through an iteration, and what it
    loses is at most the work since the newest checkpoint.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """Signal that this process received; None if it received none."""
        self._agreed: int | None = None
        self._is_ending = False
        self._is_deferred = False
        self._is_together = False
        self._place: Callable[[], str] = lambda: "its start"

    @contextmanager
    def handle_signals(self) -> Iterator["Interruption"]:
        """Handle the signals inside the block; in the main thread only. Earlier handlers are restored."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            with interrupts.call_at_first_ctrl_c(lambda: self._on_signal(signal.SIGINT, None)):
                yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self, is_deferred: bool = True) -> Iterator[None]:
        """Run a block that no signal but Ctrl-C interrupts; ask afterwards if one arrived."""
        before, self._is_deferred = self._is_deferred, is_deferred or self._is_deferred
        try:
            yield
        finally:
            self._is_deferred = before

    @contextmanager
    def together(self, n_ranks: int) -> Iterator[None]:
        """Run a block that no signal interrupts on one of several ranks, as the others would wait for it."""
        before, self._is_together = self._is_together, n_ranks > 1 or self._is_together
        try:
            yield
        finally:
            self._is_together = before

    @contextmanager
    def at(self, place: Callable[[], str]) -> Iterator[None]:
        """Name the place in which a signal inside the block finds the run, for the message of its end."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    @contextmanager
    def immediate(self, is_immediate: bool) -> Iterator[None]:
        """Inside `deferred`, run a block that a signal ends at once, also one that arrived before."""
        before, self._is_deferred = self._is_deferred, self._is_deferred and not is_immediate
        try:
            if is_immediate and self.signal is not None:
                self._on_signal(self.signal, None)
            yield
        finally:
            self._is_deferred = before

    def is_requested(self, fabric: Fabric) -> bool:
        """True if any rank received a signal; every rank must call it inside `deferred`."""
        mine = self.signal
        if fabric.world_size > 1:
            sent = torch.tensor(mine or 0, device=fabric.device)
            mine = int(cast(Tensor, fabric.all_reduce(sent, reduce_op="max"))) or None
        self._agreed = mine
        return mine is not None

    @property
    def is_agreed(self) -> bool:
        """True if the last call of `is_requested` returned True: all ranks are about to end."""
        return self._agreed is not None

    def raise_if_agreed(self) -> None:
        """End the run if the last `is_requested` was True: on all ranks, or on none.

        Raises:
            InterruptedRunError: a signal was received.
        """
        self._is_ending = self._agreed is not None
        if self._agreed == signal.SIGINT:
            raise InterruptedRunError(f"interrupted in {self._place()}", signal.SIGINT)
        if self._agreed is not None:
            raise InterruptedRunError(f"asked to end by {signal.Signals(self._agreed).name}", self._agreed)

    def raise_if_requested(self, fabric: Fabric) -> None:
        """End the run if any rank received a signal; every rank must call it inside `deferred`.

        Raises:
            InterruptedRunError: a signal was received.
        """
        self.is_requested(fabric)
        self.raise_if_agreed()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_ending:  # launchers often send SIGTERM after a Ctrl-C; the first one says how it ends
            return
        self.signal = number
        if not self._is_together and (number == signal.SIGINT or not self._is_deferred):
            self._agreed = number
            self.raise_if_agreed()
        elif number == signal.SIGINT:
            interrupts.say("interrupted: all processes end with this step; Ctrl-C again ends them at once")


def end_of_run(error: InterruptedRunError, run_dir: Path, overrides: Sequence[str] = ()) -> tuple[str, int]:
    """Return the line and the exit code with which an interrupted run ends.

    Args:
        overrides: of the command line; trust in code is not saved, and a saved logger may write into its
            run's folder alone, so resuming needs both again.
    """
    is_saved = (run_dir / CONFIG).is_file()
    if not error.is_ctrl_c:
        kept = "saved" if is_saved else "nothing was saved yet"
        again = "resume=... resumes the run" if is_saved else "the same command starts the run"
        return f"{error}: {kept}, exit code {REQUEUE}; {again}", REQUEUE
    if not is_saved:
        return f"{error}; there is nothing to resume", interrupts.EXIT_CODE
    path = os.path.relpath(run_dir) if run_dir.is_relative_to(Path.cwd()) else str(run_dir)
    value = path if re.fullmatch(r"[\w./-]+", path) else quoted(path)
    repeated = [one for one in overrides if re.match(r"\+{0,2}(trusted_modules=|logger[.=])", one)]
    if used := user_code(OmegaConf.select(OmegaConf.load(run_dir / CONFIG), "reward.functions") or {}):
        names = map(quoted, dict.fromkeys((*trusted_modules(), *used.values())))
        repeated = [one for one in repeated if f"{KEY}=" not in one] + [f"{KEY}=[{','.join(names)}]"]
    command = shlex.join(["python", "-m", "lit_rlkv.fit", f"resume={value}", *repeated])
    return f"{error}; resume with {command}", interrupts.EXIT_CODE


@contextmanager
def mark_interrupted(run_dir: Path, *, is_rank_zero: bool) -> Iterator[None]:
    """Leave the file INTERRUPTED if a signal of a scheduler ends the block.

    The exit code does not always say so: srun returns the highest code of all ranks, also of a rank that it
    killed.
    """
    if is_rank_zero:
        (run_dir / INTERRUPTED).unlink(missing_ok=True)
    try:
        yield
    except InterruptedRunError as error:
        has_state = (run_dir / CONFIG).is_file()
        if is_rank_zero and has_state and not error.is_ctrl_c:
            with suppress(OSError):
                (run_dir / INTERRUPTED).touch()
        raise
