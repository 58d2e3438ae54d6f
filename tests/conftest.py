"""What every test may rely on: no network, one thread a process, GPU tests skipped where there is no GPU.

The package itself is not imported here; whatever imports it must do so after jaxtyping's hook is installed.
"""

import os
import signal
import tempfile
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import jaxtyping
import pytest
import torch

CACHE = tempfile.TemporaryDirectory()  # of datasets that tests read; gone when the tests end
os.environ["HF_DATASETS_CACHE"] = CACHE.name

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which importing torch does not do

FORK_LIVES_S = 300


def _end_in_time() -> None:
    """A fork that waits for ever would keep the suite waiting even when its test has timed out."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(FORK_LIVES_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_time)

torch.set_num_threads(1)  # on tensors this small, more threads than free cores cost more than they give


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without one."""
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and torch sees no device"))


@pytest.fixture(autouse=True)
def _seeded_global_generator() -> None:
    """Modules that initialise themselves from torch's global generator do so alike in every test order."""
    torch.manual_seed(0)


@pytest.fixture
def _as_users_run_it() -> Iterator[None]:
    """Without the type checks of the test run, which would speak before the package's own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
