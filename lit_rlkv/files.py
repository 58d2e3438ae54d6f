"""Atomic writes of files and folders, and reads of files that anybody may have changed."""

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from lit_rlkv.checks import OneLineError

log = logging.getLogger(__name__)
ABANDONED_S = 24 * 3600.0
"""Age from which a partial file or folder counts as left by a killed process."""
MAX_CONFIG_BYTES, MAX_BYTES, MAX_LOG_BYTES = 1 << 20, 64 << 20, 4 << 30
"""Largest config, largest file that is read as one value, and largest file of lines that a run appends to."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WITHOUT_REASON = ("inline_container", "iostream error")
NOT_WRITTEN = ("I/O error", "(os error ", *WITHOUT_REASON)
"""Parts of the errors of safetensors, torch.save and tokenizers that cannot write a file."""
MAX_FILES = 10_000
"""Most files of a folder of data or of a model."""
_Content = TypeVar("_Content")


class DamagedFileError(OneLineError, ValueError):
    """A file of a run that does not hold what the run wrote."""


class WriteError(OSError):
    """A library could not write a file; it does not always say why."""


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file atomically (UTF-8, line ends unchanged)."""
    partial = _beside(path, "partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="")
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file; a pipe or a device could keep the reader waiting forever.

    Raises:
        OSError: the file does not exist, is a folder, or cannot be read.
        ValueError: it is a pipe or a device, or has more than `most` bytes.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it must be a regular file, and is a pipe or a device")
        if found.st_size > most:
            raise ValueError(f"it must have at most {most:,} bytes, and has {found.st_size:,}")
        return file.read(found.st_size)  # a larger number would be allocated at once


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe waits for a writer


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """Return the text of a regular file (UTF-8); raises what `read_bytes` raises."""
    return read_bytes(path, most).decode()


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; raises what `read_bytes` raises, and a ValueError for other texts."""
    return _parse_json(read_text(path))


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_yaml(text: str) -> None:
    """Check that a YAML text says everything once: a few aliases can stand for more than memory holds.

    Raises:
        ValueError: it has an alias, or more than MAX_CONFIG_BYTES.
        YAMLError: it is not YAML.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"a config must have at most {MAX_CONFIG_BYTES:,} bytes, and has {len(text):,}")
    for event in yaml.parse(text, Loader=yaml.SafeLoader) if "*" in text else ():
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {event.start_mark.line + 1} has an alias (*{event.anchor})")


def complete_lines(path: Path) -> list[str]:
    """Return the complete lines of a file (UTF-8), without their ends; none if there is no file.

    A last line without an end is left out: it is being written, or a crash or a full disk cut it.

    Raises:
        ValueError: it is not a regular file, has more than MAX_LOG_BYTES, or is not UTF-8.
    """
    written = read_bytes(path, MAX_LOG_BYTES) if path.exists() else b""
    return [line.decode() for line in written.split(b"\n")[:-1]]


def json_lines(path: Path) -> list[Any]:
    """Return the values of a JSON Lines file, one for each complete line; none if there is no file."""
    return [_parse_json(line) for line in complete_lines(path)]


def read_if_there(path: Path, read: Callable[[Path], _Content], absent: Any) -> _Content:
    """Return what `read` finds in a file that a run can do without; `absent` if there is none.

    Raises:
        DamagedFileError: the file cannot be read.
    """
    try:
        return read(path) if path.exists() else cast(_Content, absent)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DamagedFileError(f"{path} is damaged ({reason}); restore it, or remove it") from error


def append_if_possible(path: Path, text: str) -> None:
    """Append lines to a file that nothing depends on; a full disk causes a warning and no partial line."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)
        log.warning("cannot append to %s: %s", path, error)


@contextmanager
def atomic_dir(folder: Path, *, replaces: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` after the block, once all files are synced.

    An existing folder is replaced, or kept if `replaces` is False. After an error nothing is left; after a
    kill, a folder whose name begins with a dot. Several processes may write the same folder at once.

    Raises:
        OSError: a file cannot be written, as on a full disk, or the folder cannot be renamed.
    """
    sweep_partial(folder.parent, f"{folder.name}.", is_shared=True)
    partial = _beside(folder, "partial")
    partial.mkdir(parents=True)
    try:
        with _write_errors():
            yield partial
        for path in partial.rglob("*"):
            _share(path, partial)
            sync(path)
        sync(partial)
        if replaces:
            discard(folder)
        try:
            os.replace(partial, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_disk_full(error: BaseException | None) -> bool:
    """True if an error, or one that caused it, comes of a full disk or quota; torch.save gives no reason."""
    if error is None:
        return False
    signs = (*map(os.strerror, FULL), *WITHOUT_REASON) if isinstance(error, WriteError) else ()
    is_full = getattr(error, "errno", None) in FULL or any(sign in str(error) for sign in signs)
    return is_full or is_disk_full(error.__cause__)


@contextmanager
def _write_errors() -> Iterator[None]:
    """Raise WriteError if a library cannot write a file within the block."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError | ValueError) or not any(text in str(error) for text in NOT_WRITTEN):
            raise
        raise WriteError(f"a library could not write a file: {error}") from error


def _share(path: Path, folder: Path) -> None:
    """Give a file the permissions of its folder; safetensors makes it readable only by the owner."""
    if path.is_file() and path.stat().st_nlink == 1:  # links point to files of other folders
        path.chmod(folder.stat().st_mode & 0o666)


def discard(folder: Path) -> None:
    """Rename a folder before removing its files, so that nobody finds a partial one."""
    if folder.is_dir():
        doomed = _beside(folder, "partial-discarded")
        os.replace(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _beside(path: Path, ending: str) -> Path:
    """Return a unique name beside a path; process ids can be equal on machines that share a disk."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{ending}")


def sweep_partial(root: Path, prefix: str = "", *, is_shared: bool = False) -> None:
    """Remove partial files and folders that killed processes left, of names that begin with a prefix.

    Args:
        is_shared: keep those younger than a day, because other processes may be writing them.
    """
    newest = time.time() - ABANDONED_S if is_shared else math.inf
    for path in root.glob(f".{escape(prefix)}*.partial*"):
        with suppress(OSError):  # another process may remove it too
            if path.stat().st_mtime <= newest:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def link_tree(source: Path, target: Path) -> None:
    """Link the files of a folder into another one, or copy them if they cannot be linked."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            try:
                os.link(path, place)
            except OSError:
                shutil.copy2(path, place)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


N_SAMPLES, SAMPLE_BYTES = 64, 1 << 16


def fingerprint(folder: Path, *patterns: str) -> str:
    """Return a digest of large files without reading all of them: of names, sizes and samples.

    Up to 64 samples of 64 KiB are spread evenly over each file, its first and last bytes included.
    """
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file()):
        size = path.stat().st_size
        found.update(f"{path.relative_to(folder).as_posix()}:{size};".encode())
        last = max(size - SAMPLE_BYTES, 0)
        places = sorted({last * number // (N_SAMPLES - 1) for number in range(N_SAMPLES)})
        with path.open("rb") as file:
            for place in places:
                file.seek(place)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of a file, or of all files in a folder; none if the path does not exist.

    Raises:
        ValueError: a folder has more than MAX_FILES, as one that was given by mistake.
    """
    walk = sorted(islice(path.rglob("*"), MAX_FILES + 1)) if path.is_dir() else []
    if len(walk) > MAX_FILES:
        raise ValueError(f"{path} has more than {MAX_FILES:,} files; give a folder of data alone")
    files = walk if path.is_dir() else [path] if path.is_file() else []
    named = [(path.name if file == path else file.relative_to(path).as_posix(), file) for file in files]
    return [(name, file.stat().st_size, file.stat().st_mtime_ns) for name, file in named if file.is_file()]
