"""The lock of a run or sweep folder, which ends with its process."""

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lit_rlkv.config import ConfigError, require
from lit_rlkv.files import read_text
from lit_rlkv.run_files import BACKBONE

LOCK = ".lock"
"""Locked file in a folder while a process works there; it names the process."""
TIMEOUT_S = 0.2
"""Longest wait for a lock, in seconds; a process that is ending releases it by then."""
log = logging.getLogger(__name__)


class BusyError(ConfigError):
    """Another process works in the folder."""


class FolderLock:
    """Lock of a folder for this process, from `take` until the `with` block, or the process, ends.

    Args:
        setting: key by which the user gives another folder, for errors.
    """

    def __init__(self, setting: str = "hydra.run.dir=") -> None:
        self.setting = setting
        self._held: FileLock | None = None
        self._inode = 0

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *error: object) -> None:
        if self._held is not None:
            path = Path(self._held.lock_file)
            # The file may have been removed, and another process may have locked a new one.
            if path.exists() and path.stat().st_ino == self._inode:
                path.unlink()
            self._held.release()
            self._held = None

    def take(self, folder: Path) -> None:
        """Create and lock a folder, then release the previous one.

        If the file system has no locks, as some network file systems, a warning says so.

        Raises:
            BusyError: another process or another lock holds it.
            ConfigError: the folder cannot be written, or has a link in it.
        """
        path = folder / LOCK
        # A stranger's folder must not lead writes elsewhere. The link to the SFT model is only read.
        links = [each for each in folder.glob("*") if each.is_symlink() and each.name != BACKBONE]
        require(
            not links,
            f"{links and links[0]} is a link, and a run writes in its own folder alone; remove the link",
        )
        require(
            path.is_file() or not path.exists(),
            f"{path} cannot be written: it is not a file; give another folder ({self.setting}...)",
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error}; give another folder ({self.setting}...)"
            ) from error
        lock = FileLock(path, timeout=TIMEOUT_S)
        held: FileLock | None = lock
        try:
            lock.acquire()
        except Timeout as error:
            owner = read_text(path) or "another process"
            raise BusyError(
                f"{folder}: {owner} is at work there; wait until it has ended, or end it, or give another "
                f"folder ({self.setting}...)"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): a second process could write there too", folder, error)
            path.unlink(missing_ok=True)
            held = None
        self.__exit__()
        self._held = held
        if held is not None:
            self._inode = path.stat().st_ino
            with suppress(OSError):  # only for messages; the disk may be full
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
