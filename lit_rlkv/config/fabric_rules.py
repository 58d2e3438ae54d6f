"""Rules on the processes of a run, and on how its work is shared out among them."""

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lit_rlkv.checks import is_count
from lit_rlkv.config.building import ConfigError, require
from lit_rlkv.experience.advantages import PairAdvantage

AUTO = "auto"
FSDP2 = "fsdp2"
STRATEGIES = (AUTO, "ddp", FSDP2)
ALL_DEVICES = -1


def check_fabric(cfg: DictConfig) -> None:
    """Check the settings that do not depend on the number of launched processes.

    Raises:
        ConfigError: the first rule that is broken.
    """
    settings = cfg.fabric
    devices = settings.devices
    if devices != AUTO and not is_count(devices) and devices != ALL_DEVICES:
        raise ConfigError(
            f"fabric.devices={devices} is no number of processes; give one, -1 for all devices of this "
            f"machine, or {AUTO}"
        )
    if not is_count(settings.num_nodes):
        raise ConfigError(f"fabric.num_nodes={settings.num_nodes} is no number of machines; give at least 1")
    shards = cfg.rollout.n_shards
    if shards is not None and not is_count(shards):
        raise ConfigError(f"rollout.n_shards={shards} is no number of shards; give at least 1, or null")
    n_threads = settings.n_threads
    if n_threads is not None and not is_count(n_threads):
        raise ConfigError(
            f"fabric.n_threads={n_threads} is no number of threads; give at least 1, or null for torch's own"
        )
    if settings.strategy not in STRATEGIES:
        raise ConfigError(
            f"fabric.strategy={settings.strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}"
        )
    require(
        isinstance(settings.unshard_rollout, bool),
        f"fabric.unshard_rollout={settings.unshard_rollout} is neither true nor false; give one of them",
    )
    if settings.strategy == FSDP2:
        _check_sharded(cfg)
    else:
        require(
            not settings.unshard_rollout,
            f"fabric.unshard_rollout=true, but fabric.strategy={settings.strategy} shards nothing; drop one",
        )


GRADIENT_DIAGNOSTICS = "lit_rlkv.callbacks.gradient_"


def _check_sharded(cfg: DictConfig) -> None:
    """Refuse settings that need unsharded layers or gradients."""
    require(
        cfg.fabric.precision != "16-mixed",
        "fabric.precision=16-mixed scales losses by what it finds in whole gradients, which no rank has "
        "under fabric.strategy=fsdp2; use bf16-mixed",
    )
    require(
        cfg.fabric.quantization is None,
        f"fabric.quantization={cfg.fabric.quantization} packs weights in a way that fabric.strategy=fsdp2 "
        "cannot shard; use one of the two",
    )
    require(
        not cfg.rollout.cuda_graph,
        "rollout.cuda_graph=true cannot capture a decode step that gathers sharded layers "
        "(fabric.strategy=fsdp2); leave it out",
    )
    for name, node in cfg.diagnostics.items():
        require(
            node is None or not str(node.get("_target_")).startswith(GRADIENT_DIAGNOSTICS),
            f"diagnostics.{name} compares whole gradients, which no rank has under fabric.strategy=fsdp2; "
            f"add diagnostics.{name}=null",
        )


def check_shares(cfg: DictConfig, n_ranks: int) -> None:
    """Every rank must have as much to do as any other, for they wait for each other.

    Raises:
        ConfigError: prompts, or the rows of the SFT stage, cannot be shared out evenly.
    """
    n_shards = cfg.rollout.n_shards or n_ranks
    if n_shards % n_ranks:
        raise ConfigError(
            f"rollout.n_shards={n_shards} cannot be shared out evenly over {n_ranks} processes; give a "
            "multiple of it, or null"
        )
    shared = {"rollout.n_prompts": n_shards}
    if "sft" in cfg.stages:
        shared |= {"sft.batch_size": n_ranks, "sft.n_pairs": n_ranks}
    for name, n_parts in shared.items():
        value = OmegaConf.select(cfg, name)
        if value % n_parts:
            raise ConfigError(
                f"{name}={value} cannot be shared out evenly over {n_parts} "
                f"{'shards' if n_parts == n_shards else 'processes'}; give a multiple of {n_parts}"
            )
    algorithm = cfg.algorithm
    n_cuts = algorithm.n_minibatches * algorithm.n_micro_batches
    pairs = issubclass(get_object(algorithm.advantage._target_), PairAdvantage)
    n_own = cfg.rollout.n_prompts // n_shards * (1 if pairs else algorithm.group_size)
    if n_shards > 1 and n_own < n_cuts:
        raise ConfigError(
            f"n_minibatches × n_micro_batches = {n_cuts} parts cannot be cut from the {n_own} "
            f"{'pairs' if pairs else 'responses'} of each of {n_shards} shards; lower them, or raise "
            "rollout.n_prompts"
        )
