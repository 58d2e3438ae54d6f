"""What all stages share: tokenizer, task, device, and how a backbone is loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric import Fabric
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lit_rlkv.config import WEIGHT_DTYPES, ConfigError, as_config_errors, build, expanded
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tasks import Task
from lit_rlkv.data.tokenizers import encode, encode_prompts, load_tokenizer
from lit_rlkv.kernels.backend import set_kernels, uses_triton
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.backbone import check_length
from lit_rlkv.rng import derive_seed

CONFIG, BACKBONE, CHECKPOINTS = "config.yaml", "backbone", "checkpoints"
EVALUATION, METRICS, REPORT = "evaluation.json", "metrics.csv", "report.html"
"""Where a run folder keeps them; the report is the last that a run writes."""
KEYS_SINCE = {
    "kernels": "auto",
    "rollout": {"max_rows": None, "cuda_graph": None},
    "algorithm": {"policy_weight": 1.0},
    "diagnostics": {},
}
"""Keys that runs of earlier versions lack, and what they did."""
N_SEEN = 64
"""Problems looked at before work starts."""


@dataclass(frozen=True)
class Parts:
    """What all stages of a run share."""

    cfg: DictConfig
    fabric: Fabric
    tokenizer: PreTrainedTokenizerBase
    task: Task
    prompt_len: int
    """Tokens of the longest prompt among the first ones."""

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(**self.cfg.cache)


def load_config(run_dir: Path) -> DictConfig:
    """The config of an earlier run, with what it meant by keys that have come since."""
    saved = OmegaConf.load(run_dir / CONFIG)
    merged = OmegaConf.merge(KEYS_SINCE, saved)
    assert isinstance(merged, DictConfig)
    return merged


def build_parts(cfg: DictConfig) -> Parts:
    """Tokenizer, task and device of a run."""
    disable_progress_bar()  # transformers' own, of which every load shows one
    if cfg.fabric.n_threads is not None:
        torch.set_num_threads(cfg.fabric.n_threads)
    set_kernels(cfg.kernels)
    fabric = Fabric(
        accelerator=cfg.fabric.accelerator, devices=cfg.fabric.devices, precision=cfg.fabric.precision
    )
    _check_device(cfg, fabric.device)
    with as_config_errors("model"):
        tokenizer = load_tokenizer(expanded(cfg.model.path))
    task = build(cfg.task)
    return Parts(cfg, fabric, tokenizer, task, _measured_prompt(cfg, tokenizer, task))


def _check_device(cfg: DictConfig, device: torch.device) -> None:
    """Refuse what this device cannot do, before there is a model to try it on."""
    with as_config_errors("kernels"):
        uses_triton(torch.empty(0, dtype=WEIGHT_DTYPES[cfg.fabric.precision], device=device))
    if cfg.rollout.cuda_graph and device.type != "cuda":
        raise ConfigError(
            f"rollout.cuda_graph=true needs CUDA, and this run is on {device.type}; use null, which captures "
            "where it can"
        )


def _measured_prompt(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, task: Task) -> int:
    """Tokens of the longest of the first prompts; refuses a limit that their worked solutions exceed."""
    limit = cfg.rollout.max_new_tokens
    with as_config_errors("task"):
        problems = PromptSource(task, split="train", seed=cfg.seed).take(N_SEEN)
        if "eval" in cfg.stages:
            PromptSource(task, split="eval", seed=cfg.seed).take(1)
        longest = max(len(encode(tokenizer, problem.solution)) for problem in problems) + 1
        prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems])
    if "sft" in cfg.stages and task.is_verifiable and longest > limit:
        raise ConfigError(
            f"rollout.max_new_tokens={limit} cuts worked solutions, which take up to {longest} tokens "
            f"with their end; raise it to at least {longest}"
        )
    return prompts.token_ids.shape[1]


def load_backbone(parts: Parts, path: str | Path | None) -> PreTrainedModel:
    """The backbone of a path or hub name, or the fresh preset, on the run's device and proven replayable.

    Weights are in the run's precision, not in that of the checkpoint; in float32 under mixed precision.
    """
    with as_config_errors("model"):
        return _load_backbone(parts, path, WEIGHT_DTYPES[parts.cfg.fabric.precision])


def _load_backbone(parts: Parts, path: str | Path | None, dtype: torch.dtype) -> PreTrainedModel:
    if path is not None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    else:
        torch.manual_seed(derive_seed(parts.cfg.sft.seed, "init"))
        tokenizer = parts.tokenizer
        model = build(parts.cfg.model.preset)(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
        model = model.type(dtype)
    parts.fabric.to_device(model)
    check_length(model, parts.prompt_len + parts.cfg.rollout.max_new_tokens)
    return prepare_backbone(model.eval())
