"""Pytest plugin: a row of the record for each test as it ends; tests that passed before are left out.

A test that leaves the device unusable, as an illegal access does, ends pytest with `LOST_DEVICE`, because
every later test of the process would fail as well. When pytest is started again, it leaves that test out.
"""

import pytest
import record
from gpu_parts.stages import LOST_DEVICE
from kernel_parts.timing import is_device_lost

NAME = "tests"


@pytest.hookimpl(trylast=True)  # after -m and -k, on what is left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what passed here with this version of the package, and what left the device unusable."""
    here = record.provenance()
    done = {
        row["test"]
        for row in record.rows(NAME)
        if (row["outcome"] == "passed" or row.get("lost_device"))
        and (row["source"], row["device"]) == (here["source"], here["device"])
    }
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        items[:] = [item for item in items if item.nodeid not in done]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the call, and what ended before or failed after it."""
    if report.when != "call" and report.outcome == "passed":
        return
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    if report.failed:
        row |= {"error": report.longreprtext[-2000:], "lost_device": is_device_lost()}
    record.append(NAME, row)
    if row.get("lost_device"):
        pytest.exit(f"{report.nodeid} left the device unusable", returncode=LOST_DEVICE)
