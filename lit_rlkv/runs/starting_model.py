"""The model that RL starts from: the shared SFT models, and the choice for a run."""

import hashlib
import json
import logging
from glob import escape
from pathlib import Path

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lit_rlkv.callbacks.model_distillation import ModelDistillation
from lit_rlkv.config import (
    Config,
    ConfigError,
    as_config_errors,
    check_source,
    expanded,
    find_gguf,
    is_local,
)
from lit_rlkv.config.errors import one_line
from lit_rlkv.config.options import named_items
from lit_rlkv.files import fingerprint, stamps
from lit_rlkv.models.gguf import converted_gguf
from lit_rlkv.models.model_files import find_weights
from lit_rlkv.run_files import BACKBONE
from lit_rlkv.runs.checkpoint import Checkpoint
from lit_rlkv.runs.preflight import CheckedConfig
from lit_rlkv.settings import show

log = logging.getLogger(__name__)
HUB_TIMEOUT_S = 10.0
"""Longest wait for the hub to say that a model exists."""
CONVERTED_MODELS = "converted_models"
"""Folder in `runs_dir` of GGUF files converted to safetensors, which runs share."""
REWARD_MODEL = "reward_model"
"""Folder in a SFT model for a reward model with weights of its own."""
LOADED = ("*.safetensors", f"{REWARD_MODEL}/*.safetensors")
"""Files that a run loads from its model's folder, which may contain other models or runs."""
REWARD_HEAD = "reward_head.safetensors"
DESCRIBED = ("*config.json", "tokenizer*", "vocab*", "merges*", "*tokens*.json", "*.jinja", "*.model")
"""Files in a model's folder of its shape and its tokenizer."""
SFT_FORMAT = 2
"""Version of what the SFT stage computes and writes; a new one ignores older models."""
SFT_MODELS, SFT_DONE = "sft_models", "sft.json"
"""Folder of the SFT models that runs share, and the file that marks a finished one."""


def pretrained_path(path: str | None, runs_dir: str, key: str = "model.path") -> str | None:
    """Return what transformers loads for a model path: for a GGUF file, the folder it is converted to.

    Raises:
        ConfigError: the file cannot be converted, or there is no such folder, and the hub cannot be reached.
    """
    if path is None:
        return None
    check_source(path, key)
    file = find_gguf(path, key)
    with as_config_errors(key):
        if file is not None:
            return str(converted_gguf(file, Path(runs_dir) / CONVERTED_MODELS))
        if not is_local(path) and not isinstance(try_to_load_from_cache(path, "config.json"), str):
            try:  # transformers asks again and again for a minute
                HfApi().model_info(path, timeout=HUB_TIMEOUT_S)
            except HfHubHTTPError:  # an answer, which transformers explains
                pass
            except (OSError, HTTPError) as error:
                raise ConfigError(
                    f"{key}={path} is no folder here, and the hub cannot be asked for it: {one_line(error)}; "
                    "correct the path, or fetch the model first"
                ) from error
    return expanded(path)


def critic_dir(start: str | Path) -> str | Path:
    """Return the folder of the critics' backbone and reward head, within the SFT model or the same."""
    apart = Path(start) / REWARD_MODEL
    return apart if apart.is_dir() else start


def load_reward_head(folder: str | Path) -> dict[str, Tensor] | None:
    """Load the trained reward head in a folder; None without one.

    Raises:
        ConfigError: the file is damaged.
    """
    path = Path(folder) / REWARD_HEAD
    try:
        return load_file(path) if path.is_file() else None
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}); restore it, or start a new run") from error


def sft_model_dir(cfg: Config) -> Path:
    """Return the folder of this config's SFT model, named by a digest of everything it depends on."""
    has_mistakes = cfg.sft.on_policy_pairs.n_prompts > 0
    # Answers of the model itself depend on the cache, and on the batches in which they are drawn.
    names = ["task", "model", "sft", *(("cache", "rollout") if has_mistakes else ())]
    names += [] if cfg.environment is None else ["environment"]  # whose tools are in the prompts
    starts_scorer = cfg.sft.eviction_steps > 0
    names += ["cache", "optimizer"] if starts_scorer else []
    parts = {name: OmegaConf.to_container(cfg.source[name]) for name in names}
    parts |= {"batch_size": cfg.evaluation.batch_size} if has_mistakes else {}
    parts |= {"lr_scale": cfg.algorithm.eviction.lr_scale} if starts_scorer else {}
    sources = [cfg.task.get("path"), cfg.task.get("dataset"), cfg.model.path]
    if has_mistakes and cfg.reward.accuracy is not None:  # decides which answers are wrong
        function = cfg.reward.functions[cfg.reward.accuracy]
        parts["accuracy"] = OmegaConf.to_container(function)
        sources.append(str(function.get("path", "")).rpartition(":")[0] or None)
    files = [[] if source is None else stamps(Path(source).expanduser()) for source in sources]
    text = json.dumps([SFT_FORMAT, torch.__version__, cfg.fabric.precision, parts, files], sort_keys=True)
    return Path(cfg.runs_dir) / SFT_MODELS / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def find_starting_model(cfg: Config, run_dir: Path) -> str | Path | None:
    """Return the model that RL and evaluation start from; None if the SFT stage has to train it.

    A resumed run has its own model. Otherwise it is `model.path` if `stages` have no sft, or the shared SFT
    model.

    Raises:
        ConfigError: `stages` leave out sft, and there is no SFT model and no `model.path`.
    """
    shared = sft_model_dir(cfg)
    if (run_dir / BACKBONE / SFT_DONE).is_file():
        return run_dir / BACKBONE
    if "sft" not in cfg.stages and cfg.model.path is not None:
        return pretrained_path(cfg.model.path, cfg.runs_dir)
    if (shared / SFT_DONE).is_file():
        return shared
    if "sft" in cfg.stages:
        return None
    raise ConfigError(
        f"stages={show(cfg.stages)} need the SFT model of an earlier run with this config, found none in "
        f"{shared.parent}; add sft to stages, or give model.path"
    )


def backbone_id(start: str | Path) -> str:
    """Return the fingerprint of the weights in a folder, or in the local cache of a hub name.

    Raises:
        ConfigError: there are none that may be read.
    """
    return fingerprint(_folder_of(start), *LOADED)


def _folder_of(start: str | Path) -> Path:
    with as_config_errors("model"):
        return find_weights(start)[0].parent


def source_ids(cfg: CheckedConfig) -> dict[str, str]:
    """Return the fingerprints of files that RL reads beside weights and rows, by what they are."""
    found: dict[str, str] = {}
    for name, node in named_items(cfg.reward.functions):
        file = Path(str(node.get("path") or "").rpartition(":")[0]).expanduser()
        if file.is_file():
            found[f"reward.functions.{name}"] = fingerprint(file.parent, escape(file.name))
    if (path := pretrained_path(cfg.model.path, cfg.runs_dir)) is not None:
        found["config and tokenizer of model.path"] = fingerprint(_folder_of(path), *DESCRIBED)
    if isinstance(cfg.parts.distillation, ModelDistillation):
        teacher = _folder_of(str(pretrained_path(cfg.parts.distillation.model, cfg.runs_dir)))
        found["distillation.model"] = fingerprint(teacher, *LOADED, *DESCRIBED)
    return found


def check_sources(checkpoint: Checkpoint | None, cfg: CheckedConfig) -> None:
    """Check that the files of `source_ids` are those of a checkpoint; a changed reward costs a warning.

    Raises:
        ConfigError: a model has changed.
    """
    if checkpoint is None or "rl" not in cfg.stages:
        return
    saved, now = checkpoint.data_state.get("sources", {}), source_ids(cfg)
    for what in [what for what, known in saved.items() if now.get(what, known) != known]:
        said = f"{what} has changed since the run trained with it"
        if not what.startswith("reward."):  # whose errors may have ended the run
            raise ConfigError(f"{said}; restore it, or start a new run")
        log.warning("%s; its scores may not compare with those before", said)


def check_backbone(checkpoint: Checkpoint | None, start: str | Path, fingerprint_now: str) -> None:
    """Check that a checkpoint, which holds only trained parameters, belongs to the weights at `start`.

    Raises:
        ConfigError: the fingerprint of the weights is not the one in the checkpoint.
    """
    if checkpoint is not None and checkpoint.backbone != fingerprint_now:
        raise ConfigError(
            f"{checkpoint.path} was trained on other weights than those in {start}, which have changed "
            "since; restore them, or start a new run"
        )
