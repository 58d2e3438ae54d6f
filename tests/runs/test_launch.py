"""The number of a run's processes, by config and launcher, and their joint end."""

import atexit
import os
import select
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.utilities import distributed

from lit_rlkv.config import Config, ConfigError
from lit_rlkv.config.schema import FabricConfig
from lit_rlkv.distributed.ranks import COLLECTIVE_TIMEOUT, FORWARD_COORDINATOR
from lit_rlkv.interrupts import InterruptedRunError
from lit_rlkv.runs.launch import (
    FIRST,
    end_together,
    exit_with_parent,
    launch,
    make_fabric,
    started_processes,
    starts_other_ranks,
)
from tests.whole_runs import as_rank, free_port

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0",
    "GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost",
    "SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": "8",
}  # fmt: skip


def config(**settings):
    return Config(fabric=FabricConfig(**{"accelerator": "cpu"} | settings))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_the_world_size_is_fabric_devices():
    assert make_fabric(config()).world_size == 1
    assert make_fabric(config(devices=2)).world_size == 2


IN_SALLOC = SLURM | {"SLURM_JOB_NAME": "interactive"}


@pytest.mark.parametrize(("variables", "n_ranks"), [(TORCHRUN, 4), (SLURM, 8), (IN_SALLOC, 8)])
def test_a_launcher_decides_the_world_size(monkeypatch, variables, n_ranks):
    set_all(monkeypatch, variables)
    assert make_fabric(config()).world_size == n_ranks
    assert not starts_other_ranks(make_fabric(config()))
    with pytest.raises(ConfigError, match=r"fabric\.devices=3, but the launcher has started") as error:
        make_fabric(config(devices=3))
    assert "srun --ntasks-per-node" in str(error.value)


ONE_TASK = {
    **SLURM,
    "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1",
}  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_one_task_of_slurm_starts_the_other_processes_itself(monkeypatch, precision):
    set_all(monkeypatch, ONE_TASK)
    fabric = make_fabric(config(devices=2, precision=precision))
    assert fabric.world_size == 2
    assert starts_other_ranks(fabric)
    assert fabric.strategy.precision.precision == precision
    for devices in ("auto", 1):
        assert make_fabric(config(devices=devices)).world_size == 1
    with pytest.raises(ConfigError, match="by srun or torchrun"):
        make_fabric(config(devices=2, num_nodes=2))


def test_the_shell_of_salloc_is_one_process_however_many_the_job_may_start(monkeypatch):
    set_all(monkeypatch, {**IN_SALLOC, "SLURM_STEP_NUM_TASKS": "1"})
    assert started_processes() is None
    assert make_fabric(config()).world_size == 1


def test_one_process_of_torchrun_starts_no_others(monkeypatch):
    set_all(monkeypatch, {**ONE_TASK, **TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    with pytest.raises(ConfigError, match=r"fabric\.devices=2, but the launcher has started 1"):
        make_fabric(config(devices=2))


def wait_as_long_as_any_rollout(rank, port):
    as_rank(rank, 2, port)
    launch(make_fabric(config()))
    FORWARD_COORDINATOR.add(FORWARD_COORDINATOR.wait)
    for group in (dist.group.WORLD, FORWARD_COORDINATOR.group):
        assert group._get_backend(torch.device("cpu")).options._timeout == COLLECTIVE_TIMEOUT
    dist.destroy_process_group()


def test_collectives_time_out_later_than_the_longest_rollout():
    args = (free_port(),)
    torch.multiprocessing.start_processes(wait_as_long_as_any_rollout, args, 2, start_method="fork")
    assert COLLECTIVE_TIMEOUT.total_seconds() > 2 * 3600


def test_launches_that_would_hang_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="by srun or torchrun"):
        make_fabric(config(num_nodes=2))
    set_all(monkeypatch, {**SLURM, "SLURM_NTASKS": "7"})
    with pytest.raises(ConfigError, match="got 7 on 2 nodes; give --ntasks-per-node"):
        started_processes()
    set_all(monkeypatch, SLURM)
    monkeypatch.delenv("SLURM_STEP_ID")
    with pytest.raises(ConfigError, match="start the run by srun"):
        started_processes()


def test_a_device_that_is_not_there_is_one_clear_error():
    with pytest.raises(ConfigError, match="fabric: "):
        make_fabric(config(accelerator="tpu"))


def forked(work):
    """A child that does this work and nothing else."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(7)
    return child


def ends_with_first(watches, within_s):
    """True if a waiting process ends when the process that started it is killed."""
    alive, held_open = os.pipe()  # can be read once all that could write to it have ended
    over = threading.Event()

    def wait():
        first = os.getppid()
        watches(first, over)
        os.write(held_open, str(os.getpid()).encode())
        signal.pause()

    first = forked(lambda: (forked(wait), signal.pause()))
    os.close(held_open)
    waiting = int(os.read(alive, 20))
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    has_ended = bool(select.select([alive], [], [], within_s)[0])
    if not has_ended:
        os.kill(waiting, signal.SIGKILL)
    os.close(alive)
    return has_ended


def watch(first, over):
    threading.Thread(target=exit_with_parent, args=(first, over), daemon=True).start()


def watch_until_it_is_over(first, over):
    watch(first, over)
    over.set()


def test_a_rank_ends_with_rank_zero_but_not_after_the_run_is_over():
    assert ends_with_first(watch, within_s=20.0)
    assert not ends_with_first(watch_until_it_is_over, within_s=2.0)
    assert not ends_with_first(lambda first, over: None, within_s=2.0)


def test_a_rank_that_starts_after_rank_zero_has_ended_ends_at_once():
    nobody = forked(lambda: None)
    os.waitpid(nobody, 0)

    def start_late():
        os.environ |= {FIRST: str(nobody), "LOCAL_RANK": "1"}
        with end_together(Fabric(accelerator="cpu", devices=2)):
            threading.Event().wait(20.0)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(start_late), 0)[1]) == 1


def takes_leave(error, monkeypatch):
    """True if a process that ends by this error runs Lightning's exit handler."""
    monkeypatch.setattr(distributed, "_distributed_is_initialized", lambda: True)
    monkeypatch.setattr(distributed.torch.distributed, "destroy_process_group", lambda: os._exit(3))

    def end():
        atexit._clear()
        try:
            with end_together(Fabric(accelerator="cpu", devices=2)):
                atexit.register(distributed._destroy_dist_connection)
                if error is not None:
                    raise error
        except BaseException:
            pass
        finally:
            atexit._run_exitfuncs()

    status = os.waitstatus_to_exitcode(os.waitpid(forked(end), 0)[1])
    assert status in (3, 7)
    return status == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, True), (InterruptedRunError("all have agreed"), True), (OSError("of one rank"), False)],
)
def test_a_rank_that_fails_alone_does_not_wait_to_destroy_the_process_group(error, expected, monkeypatch):
    assert takes_leave(error, monkeypatch) == expected


def test_a_run_of_one_process_sets_no_rank_zero_id():
    with end_together(Fabric(accelerator="cpu", devices=1)):
        assert FIRST not in os.environ
    with end_together(Fabric(accelerator="cpu", devices=2)):
        assert os.environ[FIRST] == str(os.getpid())
    assert FIRST not in os.environ
