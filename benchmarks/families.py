"""Model families that replay exactly or are refused; python benchmarks/families.py writes the page of models.

Every causal LM that transformers knows is built tiny from its config, with random weights, and made to roll
out under a cache that evicts. Families whose config cannot be made small by the names below are listed apart.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.models.backbone import layer_kinds
from lit_rlkv.models.loading import without_dropout
from lit_rlkv.models.routing import routers_of
from lit_rlkv.rollout import Rollout, generate

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "models.md"
MAX_PARAMETERS = 20_000_000
"""Beyond it a config was not made small by the names that it was given."""
VOCAB, PAD = 64, 0
WEIGHT_SCALE = 4.0
"""Factor on the initial matrices: at their small scale attention is uniform, and no wrong mask would show."""
NOISE = 0.05
"""Standard deviation of what is added to every weight."""
EXACT_BELOW = 1e-4
"""Gap of a log-prob that is float error in float32; a key too many or too few moves it by far more."""
CACHE = CacheSpec(policy="snapkv", budget=8, interval=3, sink=1, window=3)
PROMPT_LENS = (14, 9, 4, 1)
N_NEW_TOKENS = 8

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 128,
    "sliding_window": 5, "use_sliding_window": True, "attention_chunk_size": 5,
    "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    # the same by the names of some families
    "ffn_dim": 64, "n_inner": 64, "ffn_hidden_size": 64, "dim_ff": 64, "encoder_layers": 1,
    "decoder_layers": 2, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "word_embed_proj_dim": 32, "embedding_size": 32, "hidden_dim": 32, "max_seq_len": 128, "rotary_dim": 4,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
    # mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 0, "shared_intermediate_size": 16, "first_k_dense_replace": 1, "mlp_ratio": 2,
    # attention through a latent
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    # recurrent and linear layers
    "state_size": 4, "mamba_d_state": 4, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "mamba_expand": 2, "mamba_d_ssm": 64, "mamba_n_groups": 1, "n_groups": 1,
    "num_heads": 4, "lru_width": 32, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "attention_hidden_size": 32,
}  # fmt: skip
"""Passed where the config of the family has a field of that name."""

_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_INDEXED = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
LIKE_PUBLISHED: dict[str, dict[str, Any]] = {
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "granitemoehybrid": _LINEAR,
    "kimi_linear": _LINEAR,
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "zamba": {"attn_layer_period": 4, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gemma3": {"text_config": _SHARED},
    "gemma3_text": _SHARED,
    "gemma3n_text": _SHARED,
    "gemma4_text": _SHARED,
    "gemma4_unified_text": _SHARED,
    "gemma4": {"text_config": _SHARED},
    "gemma4_unified": {"text_config": _SHARED},
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "xlnet": {"d_head": 8},
}
"""Settings in which a config's defaults differ from the family's checkpoints."""


@dataclass(frozen=True)
class Verdict:
    """Facts of one model family."""

    model_type: str
    name: str
    """Name of its class."""
    replay_gap: float | None = None
    """max |log-prob replayed − log-prob sampled|; None where it was not measured."""
    dense_gap: float | None = None
    """The same where the learner sees every key: what replay is for."""
    routing_gap: float | None = None
    """The same where the learner takes the sampler's experts; None if its routing cannot be replayed."""
    n_evicting: int = 0
    """Layers with attention whose keys are bounded by the budget."""
    n_windows: int = 0
    """Layers with a sliding window, or with attention in chunks."""
    n_states: int = 0
    """Layers with a state; one with attention beside it counts twice."""
    refusal: str | None = None
    not_built: str | None = None

    @property
    def is_exact(self) -> bool:
        gaps = (self.replay_gap, 0.0 if self.routing_gap is None else self.routing_gap)
        return all(gap is not None and gap < EXACT_BELOW for gap in gaps)


def judge(model_type: str) -> Verdict:
    """Build the family tiny, prepare it, roll out and replay."""
    name = _class_name(model_type)
    try:
        model = tiny_model(model_type)
    except Exception as error:  # whatever hundreds of constructors may raise
        return Verdict(model_type, name, not_built=f"{type(error).__name__}: {_one_line(error)}")
    try:
        kinds = layer_kinds(prepare_backbone(model))
        found = gaps(model)
    except ValueError as error:
        return Verdict(model_type, name, refusal=_one_line(error))
    except Exception as error:
        return Verdict(
            model_type, name, not_built=f"does not run: {type(error).__name__}: {_one_line(error)}"
        )
    n_windows = sum(kind.window is not None for kind in kinds)
    n_attending = sum(kind.attends for kind in kinds)
    n_states = sum(kind.n_states > 0 for kind in kinds)
    return Verdict(model_type, name, *found, n_attending - n_windows, n_windows, n_states)


def tiny_model(model_type: str) -> PreTrainedModel:
    """A random model of that family, small.

    Raises:
        ValueError: it would have too many parameters.
    """
    config = tiny_config(model_type)
    with torch.device("meta"):
        n_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if n_parameters > MAX_PARAMETERS:
        raise ValueError(f"{n_parameters / 1e6:.0f}M parameters with every size that could be set")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(WEIGHT_SCALE)
            # What starts at 0 or 1 has an effect only in trained models, and it shall have one here.
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


def tiny_config(model_type: str) -> PretrainedConfig:
    """The family's config, and those of its parts, with every size that they have a name for made small."""
    kind = CONFIG_MAPPING[model_type]
    sizes = _fitting(kind())
    for name, value in LIKE_PUBLISHED.get(model_type, {}).items():
        sizes[name] = sizes[name] | value if isinstance(value, dict) else value
    config: PretrainedConfig = kind(**sizes)
    return without_dropout(config)


def _fitting(default: PretrainedConfig) -> dict[str, Any]:
    known = {*default.to_dict(), *default.attribute_map}
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # all heads read one latent
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            sizes[name] = {"model_type": part.model_type, **_fitting(part)}
    return sizes


@torch.no_grad()
def gaps(model: PreTrainedModel) -> tuple[float, float, float | None]:
    """max |log-prob − sampler's| over a rollout: by replay, where the learner sees all, with its experts."""
    generator = torch.Generator().manual_seed(7)
    width = max(PROMPT_LENS)
    attention_mask = torch.arange(width) >= width - torch.tensor(PROMPT_LENS)[:, None]
    input_ids = torch.randint(1, VOCAB, attention_mask.shape, generator=generator).masked_fill(
        ~attention_mask, PAD
    )
    rollout = generate(
        model, input_ids, attention_mask, cache=CACHE, max_new_tokens=N_NEW_TOKENS, eos_token_id=None,
        pad_token_id=PAD, generator=generator, record_routing=has_replayable_routing(model),
    )  # fmt: skip

    def gap(rollout: Rollout, *, shadow: bool) -> float:
        return float((replay_logps(model, rollout, shadow=shadow) - rollout.rollout_logps).abs().max())

    chosen = rollout.with_record(expert_ids=None)
    routing_gap = None if rollout.record.expert_ids is None else gap(rollout, shadow=True)
    return gap(chosen, shadow=True), gap(chosen, shadow=False), routing_gap


def has_replayable_routing(model: PreTrainedModel) -> bool:
    try:
        return len(routers_of(model)) > 0
    except ValueError:
        return False


def page(verdicts: Sequence[Verdict]) -> str:
    """Return docs/reference/models.md."""
    exact = [v for v in verdicts if v.is_exact]
    refused = [v for v in verdicts if v.refusal is not None]
    odd = [v for v in verdicts if v.replay_gap is not None and not v.is_exact]
    not_built = [v for v in verdicts if v.not_built is not None]
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
    sections = [
        "# Models\n",
        "Written by `python benchmarks/families.py`. It builds a tiny model of every causal LM in "
        "transformers from its config, with random weights in float32, and runs a rollout under an evicting "
        "cache "
        f"({CACHE.label}, prompts of {', '.join(map(str, PROMPT_LENS))} tokens, {N_NEW_TOKENS} new ones). "
        f"{versions}.\n",
        f"{len(exact)} families are exact, {len(refused)} are refused for the given reason, "
        f"{len(not_built)} could not be tested with a tiny model. This page is only an overview: every "
        "model is checked again when it is loaded.\n",
        "## Exact\n",
        "*Replay gap* is max |replayed log-prob − sampled log-prob|; the values are float error. *Without "
        "replay* is the same for a learner that sees every key that the model lets it see.\n",
        "Of the layers of the tiny model, the policy *evicts* in those of the first column. Those with a "
        "*window* (or with chunks) of 5 tokens, which every row outgrows, keep it in a ring; those with a "
        "*state* (recurrences, short convolutions) keep the state of each row. A layer with attention and "
        "a state side by side counts in two columns. Where no layer evicts, every gap is float error.\n",
        f"*With its experts* is the replay gap of a learner that takes the sampler's experts "
        f"(`rollout.replay_routing=true`), of the {sum(v.routing_gap is not None for v in exact)} mixtures "
        "of experts whose routing can be replayed: their routers choose by one top-k over the experts. "
        "Other models are refused with that setting: they are dense, at least in this size, or choose their "
        "experts in another way, as PhiMoE does.\n",
        _table(
            [
                "family",
                "`model_type`",
                "evict",
                "window",
                "state",
                "replay gap",
                "without replay",
                "with its experts",
            ],
            [
                [
                    v.name,
                    f"`{v.model_type}`",
                    *(str(n) if n else "" for n in (v.n_evicting, v.n_windows, v.n_states)),
                    f"{v.replay_gap:.0e}",
                    f"{v.dense_gap:.2g}",
                    "" if v.routing_gap is None else f"{v.routing_gap:.0e}",
                ]
                for v in exact
            ],
        ),
        "## Refused\n",
        _table(
            ["family", "`model_type`", "reason"],
            [[v.name, f"`{v.model_type}`", _cell(v.refusal)] for v in refused],
        ),
    ]
    if odd:
        rows = [[v.name, f"`{v.model_type}`", f"{v.replay_gap:.0e}", f"{v.dense_gap:.2g}"] for v in odd]
        sections += [
            "## Accepted, but not exact: to be fixed\n",
            _table(["family", "`model_type`", "replay gap", "without replay"], rows),
        ]
    sections += [
        "## Not tested\n",
        "Their configs cannot be made small by setting common fields, or the tiny model does not run. A "
        "checkpoint of these families is checked when it is loaded, like any other.\n",
        _table(
            ["family", "`model_type`", "error"],
            [[v.name, f"`{v.model_type}`", _cell(v.not_built)] for v in not_built],
        ),
    ]
    return "\n".join(sections)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def _one_line(error: Exception, longest: int = 200) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= longest else f"{text[:longest]} ..."


def _class_name(model_type: str) -> str:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="only these, printed and not written")
    chosen = parser.parse_args().model_types
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    verdicts = []
    for model_type in chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started_at = time.perf_counter()
        verdicts.append(judge(model_type))
        print(f"{time.perf_counter() - started_at:.1f} s  {verdicts[-1]}", flush=True)
    if not chosen:
        PAGE.write_text(page(verdicts), encoding="utf-8")


if __name__ == "__main__":
    main()
