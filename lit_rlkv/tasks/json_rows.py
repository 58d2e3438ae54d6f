"""Objects of JSON files, one per line or in one list, with the line of each."""

import json
import os
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

BATCH = 1024
"""Objects between two calls of a listener."""
_BLANK = " \t\r\n"
"""Characters that JSON allows between values."""
_WIDE = (("UTF-32", (BOM_UTF32_LE, BOM_UTF32_BE)), ("UTF-16", (BOM_UTF16_LE, BOM_UTF16_BE)))
"""Encodings by their byte-order marks; that of UTF-32 begins with that of UTF-16."""
_LONG = "a number has too many digits for a number of Python; put it in quotes"
_ASKS = "write one JSON object per line, or one list of objects"

_Listener = Callable[[int, int], None]
LISTENER: ContextVar[_Listener | None] = ContextVar("listener", default=None)
"""The function that `reading_progress` gives to the readers."""


@contextmanager
def reading_progress(listener: _Listener) -> Iterator[None]:
    """Call `listener(n_done, n_total)` at times while rows are read in the block: of bytes or of rows."""
    token = LISTENER.set(listener)
    try:
        yield
    finally:
        LISTENER.reset(token)


def numbered_objects(path: Path) -> Iterator[tuple[str, str]]:
    """Return `file:line` and text of every value of a `.json` file's list, or of every line of other files.

    Raises:
        FileNotFoundError: there is no regular file.
        ValueError: the file is not UTF-8, is a list that is not JSON, begins with an object over several
            lines, or has nothing in it.
    """
    require_file(path)
    start = _first_line(path) if path.suffix.lower() == ".json" else b""
    if start == b"{":
        raise ValueError(f"{str(path)!r} has an object over several lines outside of a list; {_ASKS}")
    return _numbered_elements(path) if start.startswith(b"[") else numbered_lines(path)


def _first_line(path: Path) -> bytes:
    """Return the first line that is not blank, without its ends."""
    with path.expanduser().open("rb") as file:
        _skip_mark(file, path)
        return next((line.strip() for line in file if line.strip()), b"")


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Return `file:line` and text of every line that is not blank; raise as `numbered_objects`."""
    require_file(path)
    listener, name = LISTENER.get(), str(path)
    with path.expanduser().open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        _skip_mark(file, path)
        n_lines = 0
        for number, line in enumerate(file, start=1):
            try:
                text = line.rstrip(b"\n").decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from error
            if text.strip():
                n_lines += 1
                yield f"{name}:{number}", text
            if listener is not None and number % BATCH == 0:
                listener(file.tell(), n_bytes)
    if n_lines == 0:
        raise ValueError(f"{name!r} must have lines, got none; {_ASKS}")


def _numbered_elements(path: Path) -> Iterator[tuple[str, str]]:
    listener, name = LISTENER.get(), str(path)
    with path.expanduser().open("rb") as file:
        _skip_mark(file, path)
        content = file.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, content.count(b"\n", 0, error.start) + 1, error) from error
    del content
    decoder = json.JSONDecoder()
    at = _skip_blank(text, text.index("[") + 1)
    number, counted, n_elements = 1, 0, 0
    has_more = not text.startswith("]", at)
    while has_more:
        number, counted = number + text.count("\n", counted, at), at
        try:
            end = decoder.raw_decode(text, at)[1]
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}:{error.lineno}: not JSON ({error}); {_ASKS}") from error
        except ValueError as error:
            raise ValueError(f"{name}:{number}: {_LONG}") from error
        except RecursionError as error:
            raise ValueError(f"{name}:{number}: the JSON is nested too deeply; {_ASKS}") from error
        n_elements += 1
        yield f"{name}:{number}", text[at:end]
        if listener is not None and n_elements % BATCH == 0:
            listener(end, len(text))
        at = _skip_blank(text, end)
        has_more = text.startswith(",", at)
        if has_more:
            at = _skip_blank(text, at + 1)
    if not text.startswith("]", at):
        line = text.count("\n", 0, at) + 1
        raise ValueError(f"{name}:{line}: the list has neither a comma nor its end here; {_ASKS}")
    if text[at + 1 :].strip(_BLANK):
        line = text.count("\n", 0, at) + 1
        raise ValueError(f"{name}:{line}: something follows the end of the list; {_ASKS}")
    if n_elements == 0:
        raise ValueError(f"{name!r} must have rows, got an empty list; {_ASKS}")


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at


def _skip_mark(file: BinaryIO, path: Path) -> None:
    """Go behind the byte-order mark that some editors write; raise a ValueError for those of wide ones."""
    start = file.read(len(BOM_UTF32_LE))
    for name, marks in _WIDE:
        if start.startswith(marks):
            raise ValueError(f"{path} is {name}; convert it: iconv -f {name} -t UTF-8 {path}")
    file.seek(len(BOM_UTF8) if start.startswith(BOM_UTF8) else 0)


def _not_utf8(path: Path, number: int, error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"{path}:{number}: not UTF-8 ({error}); convert the file to UTF-8")


def require_file(path: Path) -> None:
    """Raise a FileNotFoundError unless a path is a regular file, before anything walks through a folder."""
    if not path.expanduser().is_file():
        found = "is no file" if path.expanduser().exists() else "does not exist"
        raise FileNotFoundError(f"{str(path)!r} {found}; give the path of a file of JSON lines")


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a text; raise a ValueError for anything else."""
    try:
        entry = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); write one JSON object per line") from error
    except _DuplicateKeyError:
        raise
    except ValueError as error:
        raise ValueError(_LONG) from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply; write one JSON object per line") from error
    if not isinstance(entry, dict):
        raise ValueError(f"must be an object, got {type(entry).__name__}; write one JSON object per line")
    if "\\ud" in text or "\\uD" in text:  # half of a character cannot be encoded, by a tokenizer either
        try:
            json.dumps(entry, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a text has half of a surrogate pair ({error.reason}); drop the row or fix it"
            ) from error
    return entry


class _DuplicateKeyError(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise _DuplicateKeyError(f"the key {twice!r} is given twice; leave one")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)
