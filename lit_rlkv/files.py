"""Writing files so that no reader, and no run that goes on after a kill, ever sees half of one."""

import hashlib
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

from safetensors import SafetensorError

log = logging.getLogger(__name__)
ABANDONED_S = 24 * 3600.0
"""Age from which nobody can still be writing a folder that has not appeared."""


def write_atomically(path: Path, text: str) -> None:
    """Put the text (UTF-8, line ends as they are) in the place of what the file held, all at once."""
    partial = _beside(path, "partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="")
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def complete_lines(path: Path) -> list[str]:
    """The lines of a file (UTF-8) without their ends; no lines where there is none.

    A last one without an end is left out: a crash or a full disk has cut it short, or it is being written.
    """
    written = path.read_bytes() if path.is_file() else b""
    return [line.decode() for line in written.split(b"\n")[:-1]]


def append_if_possible(path: Path, text: str) -> None:
    """Add lines to a file that nothing depends on; a full disk costs a warning, and leaves no half line."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)
        log.warning("%s could not be added to: %s", path, error)


@contextmanager
def atomic_dir(folder: Path, *, replaces: bool = True) -> Iterator[Path]:
    """A folder to write in, which takes its name once the block is done and all of it is on the disk.

    A folder that has the name by then is replaced, or else left as it is. After an error nothing stays;
    after a kill, a name that begins with a dot. Several may write the same folder, each in one of its own.

    Raises:
        OSError: a file cannot be written, as to a full disk, or the folder cannot take its name, and no other
            has taken it.
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
            if not folder.is_dir():  # else another has been faster
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _os_errors() -> Iterator[None]:
    """A block in which files that cannot be written raise OSError, by whichever library."""
    try:
        yield
    except SafetensorError as error:
        if "I/O error" not in str(error):  # of reading what is no such file, for one
            raise
        raise OSError(str(error)) from error
    except RuntimeError as error:
        if "inline_container" not in str(error):  # where torch.save writes
            raise
        raise OSError(f"torch.save: {error}") from error


def _share(path: Path, folder: Path) -> None:
    """Let all read a file who may read its folder: safetensors writes for the owner alone."""
    if path.is_file() and path.stat().st_nlink == 1:  # a link is to a file of somebody's own
        path.chmod(folder.stat().st_mode & 0o666)


def discard(folder: Path) -> None:
    """Take a folder's name away before its files, so that nobody ever finds half of it."""
    if folder.is_dir():
        doomed = _beside(folder, "partial-discarded")
        os.replace(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _beside(path: Path, ending: str) -> Path:
    """A name for this moment alone: process ids would be the same on two machines that share a disk."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{ending}")


def sweep_partial(root: Path, prefix: str = "", *, is_shared: bool = False) -> None:
    """Remove what killed processes left of folders and files whose names begin with the prefix.

    Args:
        is_shared: others may be writing there now, on any machine: what is younger than a day is spared.
    """
    newest = time.time() - ABANDONED_S if is_shared else math.inf
    for path in root.glob(f".{escape(prefix)}*.partial*"):
        with suppress(OSError):  # another may sweep, too
            if path.stat().st_mtime <= newest:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def link_tree(source: Path, target: Path) -> None:
    """The files of a folder in another one, over those of the same names; linked, or copied where it must."""
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
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


N_SAMPLES, SAMPLE_BYTES = 64, 1 << 16


def fingerprint(folder: Path, *patterns: str) -> str:
    """Tells one set of large files from another without reading all of them: names, sizes and samples.

    A sample is 64 KiB, and a file gives up to 64 of them, evenly spread, its first and last bytes included.
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
    """Name, size and time of the file at a path, or of all in the folder there; none where nothing is."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.is_file() else []
    named = [(path.name if file == path else file.relative_to(path).as_posix(), file) for file in files]
    return [(name, file.stat().st_size, file.stat().st_mtime_ns) for name, file in named if file.is_file()]
