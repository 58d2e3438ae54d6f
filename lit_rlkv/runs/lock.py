"""One process at a time in the folder of a run or a sweep: a lock file that ends with its process."""

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from lit_rlkv.config import ConfigError

LOCK = ".lock"
"""File in a folder while a process works there; it names the process and is locked by it."""
TIMEOUT_S = 0.2
"""Longest wait for a lock; a process that is just leaving has let go by then."""
MAX_OWNER = 200
"""Characters read of the file."""
log = logging.getLogger(__name__)
Lock = TypeVar("Lock", bound="FolderLock")


class BusyError(ConfigError):
    """Another process works in the folder."""


class FolderLock:
    """A folder that only this process may write in, until the block ends; none before the first `take`.

    The lock belongs to the process and not to the file: it is gone when the process is, however that ended.

    Args:
        setting: key by which the user gives another folder, for errors.
    """

    def __init__(self, setting: str = "hydra.run.dir=") -> None:
        self.setting = setting
        self._held: FileLock | None = None
        self._inode = 0

    def __enter__(self: Lock) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def take(self, folder: Path) -> None:
        """Lock this folder, which is made if need be, and release the one before.

        Where the disk has no locks, as some network disks, a warning says so, and nothing is locked.

        Raises:
            BusyError: another process holds it, or this one by another lock.
            ConfigError: the folder cannot be written.
        """
        path = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written: {error}; give another ({self.setting}...)"
            ) from error
        lock = FileLock(path, timeout=TIMEOUT_S)
        is_locked = True
        try:
            lock.acquire()
        except Timeout as error:
            owner = path.read_text(errors="replace")[:MAX_OWNER] or "another process"
            raise BusyError(
                f"{folder}: {owner} is at work there; wait until it has ended, or end it, or give another "
                f"folder ({self.setting}...)"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): nothing keeps a second process out of it", folder, error)
            path.unlink(missing_ok=True)
            is_locked = False
        self._release()
        if is_locked:
            self._held = lock
            self._inode = path.stat().st_ino
            with suppress(OSError):  # the name is for people only, and the disk may be full
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}")

    def _release(self) -> None:
        if self._held is not None:
            path = Path(self._held.lock_file)
            # Somebody may have removed the file, and another process locked a new one.
            if path.exists() and path.stat().st_ino == self._inode:
                path.unlink()
            self._held.release()
            self._held = None
