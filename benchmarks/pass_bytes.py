"""Bytes of a learner's pass by the count of `lit_rlkv.models.pass_bytes`.

    python benchmarks/pass_bytes.py [--families qwen3 llama gemma3 qwen3_moe qwen3_next] [--tokens 1024]
    python benchmarks/pass_bytes.py --longest

The first prints, for small random models that train adapters or all weights, the most bytes of live tensors
of a step for each token, measured as by learner_memory.py, and what the count says.

The second measures nothing: from the shapes of Qwen3, on the meta device, it computes the longest sequence
that learns on a card beside weights, LoRA adapters of rank 32 and Adam, without tiles and with them. Of a
card 0.7 GiB are taken by CUDA's context and 6 % by fragments, both assumed; records are not counted.
"""

import argparse
from collections.abc import Callable
from functools import partial

import command_line
import torch
from learner_memory import TILE, make_rollout, peaks
from text_table import text_table
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from lit_rlkv import prepare_backbone
from lit_rlkv.models import activations
from lit_rlkv.models.activations import Checkpoints
from lit_rlkv.models.adapters import LoraSpec, add_adapter
from lit_rlkv.models.attention import ATTENTION_NAME
from lit_rlkv.models.backbone import layer_kinds, n_kv_heads
from lit_rlkv.models.pass_bytes import PassBytes
from lit_rlkv.planning.passes import longest

VOCAB = 64
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
LINEAR = {
    "shared_expert_intermediate_size": 128,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen3": partial(Qwen3Config, **SIZE, head_dim=32),
    "llama": partial(LlamaConfig, **SIZE),
    "gemma3": partial(Gemma3TextConfig, **SIZE, head_dim=32, sliding_window=96),
    "qwen3_moe": partial(Qwen3MoeConfig, **SIZE, **EXPERTS),
    "qwen3_next": partial(Qwen3NextConfig, **SIZE, **EXPERTS, **LINEAR),
}
"""Small shapes; sizes can be given again."""
WAYS: tuple[Checkpoints, ...] = (False, True, "host")
HEADS = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
NF4_BYTES, ADAM_BYTES = 0.56, 16
"""Bytes of a weight in 4 bits; of a number that trains: itself, its gradient and two moments."""
GIB = 2**30
CASES = {
    "8B in 4 bits, 24 GB": (QWEN3_8B, NF4_BYTES, 23.6),
    "8B in bf16, 24 GB": (QWEN3_8B, 2, 23.6),
    "4B in bf16, 24 GB": (QWEN3_4B, 2, 23.6),
    "8B in bf16, 80 GB": (QWEN3_8B, 2, 79.2),
}
"""Shape, bytes of a weight of a linear layer, and GiB of the card."""
KEPT: dict[str, tuple[Checkpoints, int]] = {
    "checkpoints": (True, 2**40),
    "on the host": ("host", 2**40),
    "checkpoints, tiles": (True, 4096),
    "on the host, tiles": ("host", 4096),
}
"""Checkpoints, and tokens of a tile."""


def counted(family: str, *, trains_all: bool, keeps: Checkpoints, n_tokens: int) -> tuple[int, int]:
    """Return measured and counted bytes."""
    torch.manual_seed(0)
    model = prepare_backbone(AutoModelForCausalLM.from_config(FAMILIES[family]()))
    model.requires_grad_(trains_all)
    if not trains_all:
        add_adapter(model, "policy", LoraSpec(rank=8, alpha=16, target_modules="all-linear"))
    n_layers = sum(kind.attends for kind in layer_kinds(model))
    shape = {"num_hidden_layers": n_layers, "num_key_value_heads": n_kv_heads(model), "vocab_size": VOCAB}
    count = sum(PassBytes(model).of_pass(1, n_tokens, keeps).values())
    return peaks(model, make_rollout(n_tokens, shape), keeps)[0], count


def print_counted(families: list[str], n_tokens: int) -> None:
    activations.TILE = TILE
    rows = []
    for family in families:
        for trains_all in (False, True):
            for keeps in WAYS:
                measured, count = counted(family, trains_all=trains_all, keeps=keeps, n_tokens=n_tokens)
                per_token = (f"{n_bytes / n_tokens:,.0f}" for n_bytes in (measured, count))
                trained = "all weights" if trains_all else "adapters"
                rows.append([family, trained, str(keeps).lower(), *per_token, f"{count / measured:.2f}"])
    columns = ["family", "trained", "gradient_checkpointing", "measured", "counted", "ratio"]
    print(text_table(columns, rows))


def print_longest() -> None:
    rows = []
    for name, (shape, weight_bytes, card) in CASES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                Qwen3Config(vocab_size=151_936, **HEADS, **shape), dtype=torch.bfloat16
            )
        room = (card - 0.7) * 0.94 * GIB - resident_bytes(model, weight_bytes)
        count = PassBytes(model, is_fused=True)
        found = []
        for keeps, activations.TILE in KEPT.values():
            needed = partial(bytes_of_row, count, keeps)
            found.append(f"{longest(needed, int(room)):,}")
        rows.append([name, f"{room / GIB:.1f}", *found])
    print(text_table(["model, card", "GiB for a pass", *KEPT], rows))


def bytes_of_row(count: PassBytes, keeps: Checkpoints, n_tokens: int) -> int:
    return sum(count.of_pass(1, n_tokens, keeps).values())


def resident_bytes(model: PreTrainedModel, weight_bytes: float) -> float:
    """Give the model its adapters, and return the bytes of weights, adapters and Adam."""
    model.set_attn_implementation(ATTENTION_NAME)
    model.requires_grad_(False)
    linears = {m.weight for m in model.model.modules() if isinstance(m, torch.nn.Linear)}
    n_linear, n_weights = sum(w.numel() for w in linears), model.num_parameters()
    add_adapter(model, "policy", LoraSpec(rank=32, alpha=64, target_modules="all-linear"))
    n_trained = model.num_parameters() - n_weights
    n_bytes = 2 * (n_weights - n_linear) + weight_bytes * n_linear + ADAM_BYTES * n_trained
    # A weight in 4 bits is unpacked for its product.
    return n_bytes if weight_bytes == 2 else n_bytes + 2 * max(weight.numel() for weight in linears)


def main() -> None:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--families", nargs="+", default=[*FAMILIES], choices=[*FAMILIES])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--longest", action="store_true")
    args: argparse.Namespace = parser.parse_args()
    if args.longest:
        print_longest()
    else:
        print_counted(args.families, args.tokens)


if __name__ == "__main__":
    main()
