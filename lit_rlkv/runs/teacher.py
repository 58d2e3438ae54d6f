"""The frozen teacher of `distillation=teacher`: another model with the run's tokenizer."""

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.callbacks.model_distillation import ModelDistillation
from lit_rlkv.config import as_config_errors
from lit_rlkv.data.tokenizers import load_tokenizer
from lit_rlkv.data.validation import check_prompts_fit
from lit_rlkv.models.backbone import text_config
from lit_rlkv.models.loading import load_causal_lm
from lit_rlkv.models.preparation import prepare_backbone
from lit_rlkv.out_of_memory import explain_out_of_memory
from lit_rlkv.runs.launch import WEIGHT_DTYPES, broadcast_from_rank_zero
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import pretrained_path


def load_teacher(run: Run) -> None:
    """Load the teacher that the RL stage distils, if any, frozen and on the run's device.

    Raises:
        ConfigError: it cannot be loaded, has another tokenizer or fewer tokens, or is too short.
    """
    cfg, distillation = run.cfg, run.parts.distillation
    if not isinstance(distillation, ModelDistillation) or "rl" not in cfg.stages:
        return
    path = broadcast_from_rank_zero(
        run.fabric,
        lambda: str(pretrained_path(distillation.model, cfg.runs_dir, "distillation.model")),
    )
    with as_config_errors("distillation.model"):
        _check_same_tokenizer(run.tokenizer, load_tokenizer(path), path)
        own = distillation.dtype
        dtype = WEIGHT_DTYPES[cfg.fabric.precision] if own is None else getattr(torch, own)
        teacher = load_causal_lm(path, dtype).requires_grad_(False)
        _check_vocabulary(teacher, _policy_vocabulary(run), path)
        check_prompts_fit(teacher, run.sizes, cfg.rollout.max_new_tokens)
        device = run.fabric.device
        with explain_out_of_memory(
            lambda: (
                f"out of memory while the teacher {path} moves to {device}; set distillation.dtype=bfloat16"
            )
        ):
            nn.Module.to(teacher, device)
        distillation.teacher = prepare_backbone(teacher.eval())


def _policy_vocabulary(run: Run) -> int:
    """Return the number of the policy's logits; a preset has one for each token."""
    path = pretrained_path(run.cfg.model.path, run.cfg.runs_dir)
    if path is None:
        return len(run.tokenizer)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return int(config.get_text_config(decoder=True).vocab_size)


def _check_vocabulary(teacher: PreTrainedModel, n_tokens: int, path: str) -> None:
    n_own = text_config(teacher).vocab_size
    if n_own < n_tokens:
        raise ValueError(
            f"{path} must have logits of at least the policy's {n_tokens} tokens, got {n_own}; take another"
        )


def _check_same_tokenizer(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, path: str) -> None:
    own, other = ours.get_vocab(), theirs.get_vocab()
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"{path} must have the policy's tokenizer, because the KL is token by token; {len(differing)} "
            f"tokens differ, such as {token!r} ({own.get(token)} here, {other.get(token)} there); take a "
            "teacher of the same family"
        )
