"""Benchmarks are scripts that import each other from their own folder; their tests are slow ones."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow: no run of the package depends on a benchmark."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
