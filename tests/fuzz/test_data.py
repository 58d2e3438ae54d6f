"""Random damage to files of rows: each is read, or refused in one line that names the file and the line."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from hypothesis import strategies as st
from pyarrow import parquet

from lit_rlkv.config import as_config_errors
from lit_rlkv.tasks.preferences import load_preferences, read_preferences
from lit_rlkv.tasks.problems import JsonlTask, load_problems
from tests.fuzz.harness import cases, outcome_of, run_cases

MESSAGES = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
GOOD = {
    "prompt": "1+1=", "answer": "2", "solution": "2", "chosen": "2", "rejected": "3", "level": 1,
}  # fmt: skip
KEYS = [*GOOD, "messages", ""]
READERS: dict[str, Callable[[str], Any]] = {
    "problems": JsonlTask,
    "preferences": read_preferences,
    "problem rows": lambda path: load_problems(path, extra_columns=["level"]),
    "solution rows": lambda path: load_problems(path, solution_column="solution", answer_after="#"),
    "preference rows": load_preferences,
}

texts = st.text(max_size=8) | st.sampled_from(["", " ", "2", "\x00", "\ud800", "\u2028", "#", "é" * 3000])
numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([10**4000, -(10**4000), 1e308, 2**63, float("nan"), float("inf"), -0.0])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.just(MESSAGES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
        | st.fixed_dictionaries({"role": texts, "content": inner}).map(lambda message: [message])
    ),
    max_leaves=6,
)
rows = st.dictionaries(st.sampled_from(KEYS), values, max_size=4).map(lambda changes: GOOD | changes)
RAW = [
    b"{}", b"[]", b"null", b"3", b'"', b"{", b"\x00", b"\xff\xfe{", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08",
    b'{"prompt": "a", "prompt": "b", "answer": "1", "chosen": "1", "rejected": "2"}',
    b'{"prompt": "a", "answer": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "a", "answer": 1e999}',
    b'{"prompt": "a", "answer": NaN}',
    b'{"prompt": "\\ud800", "answer": "1", "chosen": "\\udc00", "rejected": "2"}',
    b'{"prompt": ' + b"[" * 50_000,
    b'{"a": ' * 50_000,
    b'{"prompt": "a", "answer": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt": "a", "answer": "' + b"x" * 300_000 + b'", "solution": "y"}',
]  # fmt: skip
lines = rows.map(lambda row: json.dumps(row).encode()) | st.sampled_from(RAW)


@dataclass(frozen=True)
class Damage:
    """One change of the bytes of a file, at a share of its length."""

    kind: str
    at: float
    data: bytes

    def __call__(self, content: bytes) -> bytes:
        place = int(self.at * len(content))
        if self.kind == "cut":
            return content[:place]
        if self.kind == "delete":
            return content[:place] + content[place + len(self.data) :]
        if self.kind == "repeat":
            return content[:place] + content
        if self.kind == "utf-16":
            return content.decode(errors="replace").encode("utf-16")
        if self.kind == "crlf":
            return content.replace(b"\n", b"\r\n")
        kept = place + len(self.data) if self.kind == "overwrite" else place
        return content[:place] + self.data + content[kept:]


damages = st.lists(
    st.builds(
        Damage,
        st.sampled_from(["cut", "delete", "insert", "overwrite", "repeat", "utf-16", "crlf"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=4)
        | st.sampled_from([b"\n", b"\r", b'"', b"\\", b"}", b"\xff", b"\x00"]),
    ),
    max_size=2,
)


def use(path: Path, reader: str) -> int:
    """Read the rows as a run does, use each, and return their number."""
    with as_config_errors("task"):
        task = READERS[reader](str(path))
    rng = Random(0)
    for index in range(len(task)):
        problem = task.at(index)
        json.dumps([vars(problem), task.place(index)], default=vars, ensure_ascii=False).encode()
        if problem.solution:
            task.corrupt(problem, rng)
        assert 0 <= task.score(problem, problem.solution) <= 1
    return len(task)


def check(path: Path, content: bytes, reader: str) -> None:
    path.write_bytes(content)
    found = outcome_of(lambda: use(path, reader))
    found.check_one_line("ConfigError")
    assert found.kinds or found.value > 0
    if found.kinds:
        assert path.name in found.error
    if (
        found.kinds
        and "rows" not in reader
        and not re.search(r"must have (lines|rows)", found.error)
        and not re.search(r"is UTF-(16|32)", found.error)
    ):
        assert re.search(rf"{path.name}:\d+: |^task: \d+ of \d+ rows", found.error), found.error


def check_lines(path: Path, content: bytes, damage: list[Damage], reader: str) -> None:
    for change in damage:
        content = change(content)
    check(path, content, reader)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder; the package datasets is loaded here, not in every fork."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return tmp_path_factory.mktemp("rows")


@cases(40, 1000)
def test_damaged_lines_are_read_or_refused_in_one_line(folder, n_cases):
    run_cases(
        n_cases,
        partial(check_lines, folder / "rows.jsonl"),
        content=st.lists(lines, max_size=5).map(b"\n".join),
        damage=damages,
        reader=st.sampled_from(sorted(READERS)),
    )


COLUMNS = {
    "text": ["1+1=", "2+2="], "empty": ["", None], "numbers": [1, 2**40], "floats": [0.5, float("nan")],
    "lists": [["a"], []], "messages": [MESSAGES[:1], MESSAGES], "bytes": [b"\xff", b""],
    "flags": [True, None], "none": [None, None], "nested": [{"a": {"b": [1]}}, None],
    "decimals": [Decimal("1.5"), Decimal(10) ** 20], "dates": [datetime(2020, 1, 1), None],
}  # fmt: skip
tables = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(sorted(COLUMNS)), max_size=5)


def written(kind: str, table: dict[str, str]) -> bytes:
    """Return the bytes of a file of two rows with these columns."""
    columns = {name: COLUMNS[values] for name, values in table.items()}
    if kind == "parquet":
        sink = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), sink)
        return sink.getvalue()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if kind == "json":
        return json.dumps(rows, default=str).encode()
    return "\n".join(",".join(map(str, row.values())) for row in rows).encode()


def check_table(path: Path, kind: str, table: dict[str, str], damage: list[Damage], reader: str) -> None:
    content = written(kind, table)
    for change in damage:
        content = change(content)
    check(path.with_suffix(f".{kind}"), content, reader)


@cases(15, 300)
def test_damaged_tables_are_read_or_refused_in_one_line(folder, n_cases):
    run_cases(
        n_cases,
        partial(check_table, folder / "rows"),
        kind=st.sampled_from(["parquet", "parquet", "json", "csv"]),
        table=tables.map(lambda changes: dict.fromkeys(["prompt", "answer", "level"], "text") | changes),
        damage=damages,
        reader=st.sampled_from(["problem rows", "solution rows", "preference rows"]),
    )
