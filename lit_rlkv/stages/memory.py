"""A rollout that cannot fit is refused before any work."""

import torch
from transformers import PreTrainedModel

from lit_rlkv.config import ConfigError, build
from lit_rlkv.data.memory import MemoryOfRL
from lit_rlkv.data.needs import explain_sampling
from lit_rlkv.data.settings import SamplingConfig, UpdateConfig
from lit_rlkv.rollout.sizes import has_equal_layers
from lit_rlkv.stages.parts import Parts
from lit_rlkv.units import human_bytes


def check_rollout_fits(parts: Parts, backbone: PreTrainedModel) -> None:
    """Refuse what is certain to fail: a cache and its records that alone are larger than the device.

    On a CPU nothing is certain, since memory that no sequence reaches is never really taken.

    Raises:
        ConfigError: how large they are, and what to lower.
    """
    device = parts.fabric.device
    if device.type == "cuda":
        check_fits(parts, backbone, torch.cuda.get_device_properties(device).total_memory)


def check_fits(parts: Parts, backbone: PreTrainedModel, total_bytes: int) -> None:
    """The same for a device of so much memory; where layers differ in size nothing is certain either."""
    if not has_equal_layers(backbone):
        return
    cfg, rollout = parts.cfg, parts.cfg.rollout
    memory = MemoryOfRL(
        parts.cache,
        SamplingConfig(
            n_prompts=rollout.n_prompts,
            group_size=cfg.algorithm.group_size,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            max_rows=rollout.max_rows,
        ),
        UpdateConfig(cfg.algorithm.aggregation),
        samples_dense=build(cfg.correction).samples_dense,
    )
    n_prompts = rollout.n_prompts // (rollout.n_shards or parts.fabric.world_size)
    with parts.fabric.autocast():
        sizes = memory.sizes(backbone, n_prompts, n_prompt_columns=1)  # the shortest prompt there can be
    if sizes.allocated_bytes > total_bytes:
        said = explain_sampling("the rollout", sizes, memory.advice(sizes))
        raise ConfigError(
            f"the cache of a rollout and its records take {human_bytes(sizes.allocated_bytes)}, even with "
            f"prompts of one token, and the device has {human_bytes(total_bytes)}: {said}"
        )
