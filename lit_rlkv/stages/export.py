"""Export a policy for plain transformers and peft: merged weights, adapters and heads, verified."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from peft import PeftModel, TaskType, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.config import ConfigError, is_local
from lit_rlkv.models.backbone import dense_states, head_logits, text_config
from lit_rlkv.models.hydra import Roles, acting_as
from lit_rlkv.models.kv_scorer import save_kv_scorer
from lit_rlkv.models.layouts import CRITICS
from lit_rlkv.models.model_files import find_weights
from lit_rlkv.rng import stream
from lit_rlkv.runs.model_card import ADAPTER, HEADS, VALUE_ADAPTER, Exported
from lit_rlkv.runs.starting_model import critic_dir

PROBE_SHAPE = (2, 12)
"""Rows and tokens of the inputs on which the export is compared with the policy."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Largest difference of logits by the precision of the sum, as a share of the largest logit."""


def export_policy(
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    start: str | Path,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    with_heads: bool,
    scorer: Mapping[str, Tensor] | None = None,
) -> Exported:
    """Write model, tokenizer and generation config into a folder, and adapters and heads if there are any.

    Args:
        start: path or hub name of the base model, into whose weights the adapter is merged.
        dtype: dtype of the merged weights; None: the policy's.
        scorer: weights of the scorer of a trained eviction policy; None without one.

    Raises:
        ConfigError: the merged model differs from the policy, or from the files written.
    """
    policy = roles.backbone("policy")
    adapter = roles.layout.adapter["policy"]
    if adapter is not None:
        save_adapter(policy, adapter, start, folder / ADAPTER)
    merged = merged_model(policy, start, None if adapter is None else folder / ADAPTER)
    with widened(policy, merged.dtype):
        expected = policy_logits(roles, probe_tokens(merged))
    check_equal(expected, merged)  # before rounding, which may hide a small adapter
    merged = merged.to(dtype or policy.dtype)  # type: ignore[arg-type]
    gap = logits_gap(expected, merged)  # no bound holds for all weights
    if not math.isfinite(gap):
        raise ConfigError(
            f"the merged model's logits overflow in {merged.dtype}; use dtype=bfloat16 or float32"
        )
    merged.save_pretrained(folder)
    check_written(merged, folder)
    tokenizer.save_pretrained(folder)
    if scorer is not None:
        save_kv_scorer(scorer, folder)
    heads = save_heads(roles, folder / HEADS) if with_heads else ()
    value = roles.layout.adapter["value"]
    has_value_adapter = "value" in heads and value not in (None, adapter)
    if has_value_adapter:
        assert value is not None
        save_adapter(roles.backbone("value"), value, critic_dir(start), folder / VALUE_ADAPTER)
    name = str(merged.dtype).removeprefix("torch.")
    critics = tuple(role for role in CRITICS if role in roles.heads)
    return Exported(name, gap, adapter is not None, has_value_adapter, heads, critics, scorer is not None)


def merged_model(policy: PreTrainedModel, start: str | Path, adapter: Path | None) -> PreTrainedModel:
    """Return the policy as a plain model, with the adapter of a folder merged if given.

    The dtype is float32 at least, because an adapter's change may be below the precision of the weights.
    """
    wide = torch.promote_types(policy.dtype, torch.float32)
    # Load in the policy's dtype first: its adapter was trained on weights rounded to it.
    plain = plain_model(start, policy.dtype).to(wide)  # type: ignore[arg-type]
    if adapter is None:
        plain.load_state_dict(policy.state_dict())
        return plain
    merged: PreTrainedModel = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()
    return merged.eval()


@contextmanager
def widened(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Convert all weights to a wider dtype within the block, and back after it."""
    tensors = [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
    before = [each.dtype for each in tensors]
    try:
        for each in tensors:
            each.data = each.data.to(dtype)
        yield
    finally:
        for each, was in zip(tensors, before, strict=True):
            each.data = each.data.to(was)


def plain_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model by transformers alone, from files that have been checked."""
    find_weights(path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    return model.eval()


def save_adapter(backbone: PreTrainedModel, adapter: str, base: str | Path, folder: Path) -> None:
    """Save an adapter of a backbone in peft's format; it names its base model if that is on the hub."""
    config = copy.deepcopy(cast("dict[str, Any]", backbone.peft_config)[adapter])
    config.task_type = TaskType.CAUSAL_LM
    config.base_model_name_or_path = None if is_local(str(base)) else str(base)
    config.inference_mode = True
    weights = get_peft_model_state_dict(backbone, adapter_name=adapter, save_embedding_layers=False)
    folder.mkdir()
    # peft prefixes names, because it wraps a model twice.
    save_file(
        {f"base_model.model.{name}": value.detach().contiguous().cpu() for name, value in weights.items()},
        folder / "adapter_model.safetensors",
    )
    config.save_pretrained(str(folder))


def save_heads(roles: Roles, path: Path) -> tuple[str, ...]:
    """Save the scalar heads as `ROLE.linear.weight` [1, dim] and `ROLE.linear.bias` [1]; return the roles."""
    names = tuple(role for role in CRITICS if role in roles.heads)
    weights = {
        f"{role}.{name}": value.detach().contiguous().cpu()
        for role in names
        for name, value in roles.head(role).state_dict().items()
    }
    save_file(weights, path)
    return names


def logits_gap(expected: Float[Tensor, "batch seq vocab"], merged: PreTrainedModel) -> float:
    """Return max |merged − policy| over the logits of a few tokens."""
    with torch.no_grad():
        found = merged(probe_tokens(merged), use_cache=False).logits
    return float((found.double() - expected.double()).abs().max())


def check_equal(expected: Float[Tensor, "batch seq vocab"], merged: PreTrainedModel) -> None:
    """Check that the merged model computes what the policy does.

    Raises:
        ConfigError: logits differ by more than rounding error.
    """
    gap = logits_gap(expected, merged)
    allowed = TOLERANCE[merged.dtype] * float(expected.abs().max())
    if not gap <= allowed:
        raise ConfigError(
            f"the merged model's logits must be within {allowed:.2g} of the policy's, got {gap:.2g}; this "
            "architecture cannot be merged by peft"
        )


def check_written(merged: PreTrainedModel, folder: Path) -> None:
    """Check that plain transformers loads the merged model from the folder bit for bit.

    Raises:
        ConfigError: a weight differs.
    """
    written = plain_model(folder, merged.dtype).state_dict()
    for name, weight in merged.state_dict().items():
        if name not in written or not torch.equal(written[name], weight):
            raise ConfigError(
                f"{name} differs between the export and the merged model; this version of transformers "
                "cannot export this architecture"
            )


@torch.no_grad()
def policy_logits(roles: Roles, input_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
    """Return the policy's logits with a dense cache."""
    with acting_as(roles, "policy") as backbone:
        hidden = dense_states(backbone, input_ids.to(backbone.device))
        return head_logits(backbone, hidden).cpu()


def probe_tokens(model: PreTrainedModel) -> Int[Tensor, "batch seq"]:
    """Return a few random tokens, equal for every model with this vocabulary size."""
    return torch.randint(text_config(model).vocab_size, PROBE_SHAPE, generator=stream(0, "export"))
