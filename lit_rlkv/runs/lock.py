"""One process at a time in the folder of a run or a sweep: a lock that others see, and that ends with it."""

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lit_rlkv.config import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""In a folder while a process is at work there; says which, and is locked by it."""
N_TRIES = 10
MAX_OWNER = 200
"""Bytes read of what a lock says."""
log = logging.getLogger(__name__)
Lock = TypeVar("Lock", bound="FolderLock")


class BusyError(ConfigError):
    """Another process is at work in the folder."""


class FolderLock:
    """The folder that this process alone may write in, until the block ends; none before the first is taken.

    A lock of the system (flock), not the file as such: it is gone when its process is, however that ended.

    Args:
        setting: by which the user gives another folder.
    """

    def __init__(self, setting: str = "hydra.run.dir=") -> None:
        self.setting = setting
        self._held: tuple[Path, int] | None = None

    def __enter__(self: Lock) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self._let_go()

    def take(self, folder: Path) -> None:
        """Have this folder, which is made if need be, instead of the one before.

        Where there are no locks, such as on some network disks, a warning says so, and nothing is locked.

        Raises:
            BusyError: another process has it, or this one by another lock.
            ConfigError: the folder cannot be written.
        """
        taken = _locked(folder, self.setting)
        self._let_go()
        self._held = taken

    def _let_go(self) -> None:
        if self._held is not None:
            path, descriptor = self._held
            self._held = None
            if _is_at(path, descriptor):
                path.unlink()
            os.close(descriptor)


def _locked(folder: Path, setting: str) -> tuple[Path, int] | None:
    """The lock's file and its open descriptor, None where there are no locks."""
    path = folder / LOCK
    for _ in range(N_TRIES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error}; give another ({setting}...)") from error
        try:
            is_locked = _lock(descriptor, folder, setting)
        except BusyError:
            os.close(descriptor)
            raise
        if is_locked and _is_at(path, descriptor):
            with suppress(OSError):  # for people alone, and the disk may be full
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return path, descriptor
        os.close(descriptor)
        if not is_locked:
            path.unlink(missing_ok=True)
            return None
        # Who had it before has removed it since it was opened.
    log.warning("%s cannot be kept locked: nothing keeps a second process out of it", folder)
    return None


def _lock(descriptor: int, folder: Path, setting: str) -> bool:
    """Lock the file; return False where locks are not supported.

    Raises:
        BusyError: it is already.
    """
    if fcntl is None:
        log.warning("this system has no flock: nothing keeps a second process out of %s", folder)
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, MAX_OWNER, 0).decode(errors="replace") or "another process"
        raise BusyError(
            f"{folder}: {owner} is at work there; wait until it has ended, or end it, or give another folder "
            f"({setting}...)"
        ) from error
    except OSError as error:
        log.warning("%s cannot be locked (%s): nothing keeps a second process out of it", folder, error)
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """True if the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
