"""Settings of every test: no network, one thread per process, GPU tests skipped where there is no GPU.

The package is not imported at the top of this file: jaxtyping's hook must be installed before.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import jaxtyping
import pytest
import torch

CACHE = tempfile.TemporaryDirectory()  # for the datasets that tests read; deleted when the tests end
os.environ["HF_DATASETS_CACHE"] = CACHE.name

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which importing torch does not do

FORK_LIVES_S = 300


def _end_in_time() -> None:
    """End this fork in time; else the suite would wait for it after its test timed out."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(FORK_LIVES_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_time)

torch.set_num_threads(1)  # on tensors this small, more threads than free cores cost more than they give


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA."""
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and torch sees no device"))


@pytest.fixture(autouse=True)
def _seeded_global_generator() -> None:
    """Seed torch's global generator, so that modules are initialised alike in every order of the tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def share_sft_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from a config to its SFT model, which is trained once for all workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(cfg) -> Path:
        from tests.whole_runs import shared_sft_model  # the package, which comes after jaxtyping's hook

        return shared_sft_model(cfg, shared)

    return get


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory: pytest.TempPathFactory, share_sft_model: Callable[..., Path]) -> Path:
    """Return a folder with an SFT model, and with a run that started from it, `first`."""
    from tests.whole_runs import config, run

    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder))
    run(folder, "first", "stages=[rl]", "diagnostics=none")
    return folder


@pytest.fixture
def _as_users_run_it() -> Iterator[None]:
    """Turn off the type checks of the test run, which would raise before the package's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def own_ctrl_c():
    """Give the test Python's own handler of Ctrl-C, which a test run in the background ignores."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
