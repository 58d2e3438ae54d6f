"""Writing files so that no reader, and no run that goes on after a kill, ever sees half of one."""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)


def write_atomically(path: Path, text: str) -> None:
    """Put the text (UTF-8, line ends as they are) in the place of what the file held, all at once."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="")
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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
def appearing_whole(folder: Path, *, replaces: bool = True) -> Iterator[Path]:
    """A folder to write in, which takes its name once the block is done and all of it is on the disk.

    A folder that has the name by then is replaced, or else left as it is. After an error nothing stays;
    after a kill, a name that begins with a dot. It holds the process: two may write the same folder.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if replaces:
            discard(folder)
        if not folder.exists():
            os.replace(partial, folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def discard(folder: Path) -> None:
    """Take a folder's name away before its files, so that nobody ever finds half of it."""
    if folder.is_dir():
        doomed = folder.with_name(f".{folder.name}.{os.getpid()}.partial-discarded")
        os.replace(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep_partial(root: Path, prefix: str) -> None:
    """Remove what killed processes left of folders whose names begin with the prefix."""
    for path in root.glob(f".{prefix}*.partial*"):
        shutil.rmtree(path, ignore_errors=True)


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


def fingerprint(folder: Path, pattern: str) -> str:
    """Tells one set of large files from another without reading all of them: names, sizes and samples.

    A sample is 64 KiB, and a file gives up to 64 of them, evenly spread, its first and last bytes included.
    """
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob(pattern)):
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
