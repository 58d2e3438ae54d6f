"""The processes of a run: their number, their start by Lightning, torchrun or srun, and their joint end."""

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, DoublePrecision, Precision
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import Strategy
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_rlkv.checks import OneLineError
from lit_rlkv.config import Config, as_config_errors, require
from lit_rlkv.distributed.ranks import COLLECTIVE_TIMEOUT
from lit_rlkv.distributed.sharding import ShardedStrategy

AUTO = "auto"
FSDP2 = "fsdp2"
ALL_DEVICES = -1
WEIGHT_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float32,
    "bf16-mixed": torch.float32,
}
"""Dtype of the weights for each `fabric.precision`."""
Found = TypeVar("Found")


def make_fabric(cfg: Config) -> Fabric:
    """Return the Fabric of a run; `launch` then starts the other processes if no launcher has.

    `fabric.devices=auto` is one process, or as many as torchrun, srun or `fabric run` has started. A SLURM
    job with one task may have many devices; the run then starts its processes as without SLURM.

    Raises:
        ConfigError: a launcher has started another number of processes, or a device does not exist.
    """
    settings = cfg.fabric
    started = started_processes()
    plugins: list[Precision | ClusterEnvironment | CheckpointIO] = []
    is_one_task = started == (1, 1) and not TorchElasticEnvironment.detect()  # of SLURM
    if is_one_task and settings.devices not in (AUTO, 1):
        started = None
        plugins.append(LightningEnvironment())
    n_own = settings.devices if isinstance(settings.devices, int) else 1
    n_nodes, n_devices = started or (settings.num_nodes, n_own)
    require(
        started is not None or n_nodes == 1,
        f"fabric.num_nodes={n_nodes}: one process cannot start those of other machines; start the run there "
        "too, by srun or torchrun",
    )
    require(
        started is None or (settings.num_nodes in (1, n_nodes) and settings.devices in (AUTO, n_devices)),
        f"fabric.num_nodes={settings.num_nodes} and fabric.devices={settings.devices}, but the launcher has "
        f"started {n_devices} processes on each of {n_nodes} nodes; leave both out, and have it start as "
        "many as there are devices (srun --ntasks-per-node, torchrun --nproc-per-node)",
    )
    is_double = settings.precision == "64-true"
    if is_double:
        # Fabric refuses the name "64-true" under FSDP2.
        plugins.append(DoublePrecision())
    with as_config_errors("fabric"):
        try:
            if _is_step_of_salloc():
                plugins.append(SLURMEnvironment())
            return Fabric(
                accelerator=settings.accelerator,
                devices=n_devices,
                num_nodes=n_nodes,
                strategy=_strategy(cfg, n_nodes, n_devices),
                precision=None if is_double else fabric_precision(settings.precision),
                plugins=plugins,
            )
        except (MisconfigurationException, RuntimeError) as error:
            raise ValueError(str(error)) from error


def fabric_precision(precision: str) -> Any:
    """Return the precision for Fabric.

    bf16-true becomes 32-true: weights are loaded in bfloat16, and everything trained beside them stays in
    float32. Fabric would also round adapters, heads and buffers, and make every new tensor bfloat16, such as
    rewards.
    """
    return "32-true" if precision == "bf16-true" else precision


def _strategy(cfg: Config, n_nodes: int, n_devices: int) -> str | Strategy:
    if cfg.fabric.strategy != FSDP2:
        return str(cfg.fabric.strategy)
    n_local = torch.cuda.device_count() if n_devices == ALL_DEVICES else n_devices
    return ShardedStrategy(n_nodes * n_local, keeps_whole=cfg.fabric.unshard_rollout)


def launch(fabric: Fabric) -> None:
    """Start the other processes of a run, or connect to those that a launcher has started."""
    if "LT_CLI_USED" not in os.environ:  # under `fabric run` the constructor of Fabric does it
        fabric.launch()
    world = dist.group.WORLD if dist.is_available() else None
    if world is not None:
        # Set only now, so that an unreachable rank is reported after the shorter default.
        world.set_timeout(COLLECTIVE_TIMEOUT)


def starts_other_ranks(fabric: Fabric) -> bool:
    """True if the first process of the run starts the others, and no launcher does."""
    strategy = fabric.strategy
    return isinstance(strategy, ParallelStrategy) and isinstance(
        strategy.cluster_environment, LightningEnvironment
    )


def _is_step_of_salloc() -> bool:
    """True if srun started this process in a job of salloc; Lightning takes it for the job's shell.

    The shell itself is a step with one task.
    """
    has_tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    is_named_so = os.environ.get("SLURM_JOB_NAME") == "interactive"
    return has_tasks and is_named_so and not TorchElasticEnvironment.detect()


def started_processes() -> tuple[int, int] | None:
    """Return the number of nodes and of processes per node that a launcher has started; None without one.

    Raises:
        ConfigError: srun has started different numbers of tasks on the nodes.
    """
    if TorchElasticEnvironment.detect():  # torchrun, and `fabric run`, which calls it
        n_local = int(os.environ["LOCAL_WORLD_SIZE"])
        return int(os.environ["WORLD_SIZE"]) // n_local, n_local
    if _is_step_of_salloc() or SLURMEnvironment.detect():
        n_nodes, n_tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS"])
        require(
            n_tasks <= 1 or "SLURM_STEP_ID" in os.environ,
            f"this job has {n_tasks} tasks, but one process was started, which would wait for the others "
            "forever; start the run by srun",
        )
        require(
            n_tasks % n_nodes == 0,
            f"srun must start equally many tasks on each node, got {n_tasks} on {n_nodes} nodes; give "
            "--ntasks-per-node",
        )
        return n_nodes, n_tasks // n_nodes
    return None


def broadcast_from_rank_zero(fabric: Fabric, find: Callable[[], Found]) -> Found:
    """Compute a value on rank 0 and return it on every rank.

    Raises:
        OneLineError: rank 0 raised it; every rank raises the same.
    """
    if fabric.world_size == 1:
        return find()
    found: Found | OneLineError | None = None
    if fabric.is_global_zero:
        try:
            found = find()
        except OneLineError as error:
            found = error
    found = fabric.broadcast(found)
    if isinstance(found, OneLineError):
        raise found
    return cast(Found, found)


FIRST = "LIT_RLKV_FIRST_PROCESS"
"""Environment variable with the process that starts the others."""
POLL_S = 0.5


@contextmanager
def end_together(fabric: Fabric) -> Iterator[None]:
    """End all ranks if one of them fails within the block, which includes their launch.

    Lightning ends the processes that it has started when one of them fails, but not when the process that
    started them fails. torchrun and srun end all of theirs.
    """
    # On Windows the parent of a process in a virtual environment is a stub.
    is_ours = os.name == "posix" and fabric.world_size > 1 and starts_other_ranks(fabric)
    first = os.environ.get(FIRST) if os.environ.get("LOCAL_RANK", "0") != "0" else None
    over = threading.Event()
    if is_ours and first is not None:
        threading.Thread(target=exit_with_parent, args=(int(first), over), daemon=True).start()
    elif is_ours:
        os.environ[FIRST] = str(os.getpid())
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        # Lightning's exit handler calls NCCL, which waits for the other ranks, and they wait for this one.
        atexit.unregister(_destroy_dist_connection)
        raise
    finally:
        over.set()
        os.environ.pop(FIRST, None)


def exit_with_parent(parent: int, over: threading.Event) -> None:
    """End this process at once if the one that started it ends before `over` is set."""
    while os.getppid() == parent:
        if over.wait(POLL_S):
            return
    os._exit(1)
