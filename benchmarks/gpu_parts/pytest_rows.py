"""Pytest plugin: a row of the record for each test as it ends; tests that passed before are left out."""

import pytest
import record

NAME = "tests"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what passed on this machine with this version of the package."""
    done = [item for item in items if record.find(NAME, test=item.nodeid, outcome="passed") is not None]
    if done:
        items[:] = [item for item in items if item not in done]
        config.hook.pytest_deselected(items=done)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the call, and what ended before or failed after it."""
    if report.when == "call" or report.outcome != "passed":
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        record.append(NAME, row | {"error": report.longreprtext[-2000:]} if report.failed else row)
