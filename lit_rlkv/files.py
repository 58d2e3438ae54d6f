"""Atomic writes of files and folders, so that no reader and no resumed run sees a partial one."""

import hashlib
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

log = logging.getLogger(__name__)
ABANDONED_S = 24 * 3600.0
"""Age from which a partial file or folder counts as left by a killed process."""


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file atomically (UTF-8, line ends unchanged)."""
    partial = _beside(path, "partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="")
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def complete_lines(path: Path) -> list[str]:
    """Return the complete lines of a file (UTF-8), without their ends; none if there is no file.

    A last line without an end is left out: it is being written, or a crash or a full disk cut it.
    """
    written = path.read_bytes() if path.is_file() else b""
    return [line.decode() for line in written.split(b"\n")[:-1]]


def json_lines(path: Path) -> list[Any]:
    """Return the values of a JSON Lines file, one for each complete line; none if there is no file."""
    return [json.loads(line) for line in complete_lines(path)]


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
        with _os_errors():
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


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise OSError if a library cannot write a file within the block."""
    try:
        yield
    except SafetensorError as error:
        if "I/O error" not in str(error):  # such as an error of reading
            raise
        raise OSError(str(error)) from error
    except RuntimeError as error:
        if "inline_container" not in str(error):  # raised by torch.save
            raise
        raise OSError(f"torch.save: {error}") from error


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
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
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
    """Return name, size and time of a file, or of all files in a folder; none if the path does not exist."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.is_file() else []
    named = [(path.name if file == path else file.relative_to(path).as_posix(), file) for file in files]
    return [(name, file.stat().st_size, file.stat().st_mtime_ns) for name, file in named if file.is_file()]
