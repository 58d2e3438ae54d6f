"""The models of a run on the meta device: shapes and no weights, from a config.json or a preset."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lit_rlkv.config import Config, ConfigError, as_config_errors, build, check_source, expanded, find_gguf
from lit_rlkv.config.errors import one_line
from lit_rlkv.config.options import named_items
from lit_rlkv.models.activations import checkpointed_layers
from lit_rlkv.models.adapters import LoraSpec
from lit_rlkv.models.attention import ATTENTION_NAME
from lit_rlkv.models.backbone import n_kv_heads, optional_setting, text_config
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import CRITICS
from lit_rlkv.models.loading import friendly_errors
from lit_rlkv.models.pass_bytes import PassBytes
from lit_rlkv.planning.cards import Card
from lit_rlkv.planning.passes import SIXTEEN_BITS

N_PRESET_TOKENS = 64
"""Vocabulary of a preset, about that of a task's own tokenizer."""


def needed_roles(cfg: Config, advantage: Any, callbacks: Iterable[Any]) -> set[str]:
    """Return the roles that advantage, KL, reward and callbacks need beside the policy."""
    needed = {*advantage.needs}
    if cfg.reward.learned != 0:
        needed.add("reward")
    if cfg.algorithm.kl.weight > 0:
        needed.add("reference")
    return needed.union(*(getattr(callback, "needs", ()) for callback in callbacks))


def roles_of(cfg: Config) -> Roles:
    """Return the roles of a config with their adapters and heads, on the meta device and in the run's dtype.

    Raises:
        ConfigError: there is no config of the model, or no model of its type.
    """
    dtype, settings = _weight_dtype(cfg), cfg.roles
    targets = settings.target_modules
    nodes = [cfg.distillation, *(node for _, node in named_items(cfg.user_callbacks))]
    callbacks = [build(node) for node in nodes if node is not None]
    needed = needed_roles(cfg, build(cfg.algorithm.advantage), callbacks)
    config = None if cfg.model.path is None else model_config(cfg.model.path)

    def load(_: str) -> PreTrainedModel:
        if config is None:
            assert cfg.model.preset is not None
            model: PreTrainedModel = build(cfg.model.preset)(N_PRESET_TOKENS, 0, 1)
        else:
            model = _causal_lm(str(cfg.model.path), config)
        n_heads, n_kv = optional_setting(text_config(model), "num_attention_heads"), n_kv_heads(model)
        if isinstance(n_heads, int) and n_heads % n_kv:
            raise ValueError(f"{n_heads} heads are no multiple of {n_kv} KV heads; mend its config")
        model.set_attn_implementation(ATTENTION_NAME)
        return model.type(dtype)

    with as_config_errors("model"), torch.device("meta"):
        first = load("policy")
        return Roles(
            settings.layout,
            load,
            lora=LoraSpec(
                settings.rank, settings.alpha, targets if isinstance(targets, str) else list(targets)
            ),
            needed=needed,
            reward_head=ScalarHead(text_config(first).hidden_size).state_dict()
            if needed & {*CRITICS}
            else None,
        )


def teacher_bytes(cfg: Config) -> int:
    """Return the bytes of the weights of another model that teaches beside the run's; 0 without one.

    Raises:
        ConfigError: there is no config of it, or no model of its type.
    """
    teacher = None if cfg.distillation is None else build(cfg.distillation)
    if teacher is None or getattr(teacher, "model", None) is None:  # the policy itself teaches
        return 0
    config = model_config(teacher.model, "distillation.model")
    dtype = _weight_dtype(cfg) if teacher.dtype is None else getattr(torch, teacher.dtype)
    with as_config_errors("distillation.model"), torch.device("meta"):
        model = _causal_lm(teacher.model, config)
    return sum(weight.numel() for weight in model.parameters()) * int(dtype.itemsize)


def _weight_dtype(cfg: Config) -> torch.dtype:
    return {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(cfg.fabric.precision, torch.float32)


def _causal_lm(path: str, config: PretrainedConfig) -> PreTrainedModel:
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{path} is no causal LM but {config.model_type}; give one")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def pass_bytes_of(cfg: Config, roles: Roles, card: Card) -> PassBytes:
    """Return the count of the passes of the policy's backbone on a card, in the precision of a config.

    Raises:
        ConfigError: its forward cannot be followed without weights.
    """
    model, precision = roles.backbone("policy"), cfg.fabric.precision
    autocast = SIXTEEN_BITS[precision] if precision.endswith("mixed") else None
    if autocast is not None and cfg.fabric.strategy == "fsdp2":  # gathers its layers in 16 bits
        model = copy.deepcopy(model)
        for layer in checkpointed_layers(model):
            layer.to(autocast)
    try:
        with _as_on_a_device():
            return PassBytes(model, is_fused=card.is_gpu, autocast=autocast)
    except Exception as error:  # of any model's own code
        raise ConfigError(
            f"model.path: a forward of {type(roles.backbone('policy')).__name__} cannot be followed without "
            f"weights, if it can be trained here at all ({one_line(error)[:200]}); docs/reference/models.md "
            "has the families"
        ) from error


@contextmanager
def _as_on_a_device() -> Iterator[None]:
    """Let models switch autocast off, and multiply by experts in any dtype, as the meta device does not."""
    autocast, grouped_mm = torch.autocast, functional.grouped_mm

    def of_device(device_type: str, *args: Any, **options: Any) -> Any:
        return autocast("cpu" if device_type == "meta" else device_type, *args, **options)

    def of_one(rows: Tensor, experts: Tensor, **options: Any) -> Tensor:
        return rows @ experts[0]

    torch.autocast, functional.grouped_mm = of_device, of_one  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.autocast, functional.grouped_mm = autocast, grouped_mm  # type: ignore[misc]


def model_config(path: str, key: str = "model.path") -> PretrainedConfig:
    """Return the config of a model path, the value of `key`; of a hub name its config.json alone is fetched.

    Raises:
        ConfigError: it cannot be had, or transformers has no model of its type.
    """
    check_source(path)
    file = find_gguf(path)
    try:
        with friendly_errors(path):
            if file is not None:
                return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
            return AutoConfig.from_pretrained(str(expanded(path)), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(
            f"{key}={path}: {one_line(error).split('. ')[0]}; a plan reads the config.json of a "
            "causal LM that the installed transformers has"
        ) from error
