"""Benchmarks are scripts that import each other from their own folder; their tests are slow ones."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))


@pytest.fixture(autouse=True)
def _own_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a record that is off and empty, as a new process has it."""
    import record

    monkeypatch.setattr(record, "is_on", False)
    monkeypatch.setattr(record, "unrecorded", [])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow: no run of the package depends on a benchmark."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
