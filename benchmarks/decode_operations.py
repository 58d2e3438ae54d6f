"""Count the operations of a decode step outside of attention, with eager and with compiled layers.

    python benchmarks/decode_operations.py [--layers 28]

The model is a Qwen3 of few dimensions and as many layers as asked for, on a CPU. Counted by torch's profiler
in one step: operators that compute or copy something, products, and loops that torch.compile fused. On a GPU
each of them is a kernel. Views are not counted, nor what runs inside of the attention over the cache.
Compilation takes seconds per layer. Rows go to benchmarks/results/decode_operations.jsonl.
"""

import argparse
import time

import command_line
import record
import torch
from text_table import text_table
from torch._inductor import config as inductor_config
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile, record_function
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.kvcache.layer import SlotLayer
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.backbone import hidden_states
from lit_rlkv.models.compiled_layers import CompiledLayers

NAME = "decode_operations"
ATTENTION = "attention over the cache"
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
FUSED = "cpp_fused"
# fmt: off
NO_WORK = {
    "view", "_unsafe_view", "reshape", "transpose", "t", "slice", "select", "unsqueeze", "squeeze",
    "expand", "permute", "detach", "alias", "split", "as_strided", "_reshape_alias", "unbind", "chunk",
    "narrow", "empty", "empty_like", "empty_strided", "resize_", "result_type", "resolve_conj",
    "resolve_neg", "contiguous", "lift_fresh", "is_nonzero", "item", "_local_scalar_dense", "numpy_T",
    "linear", "matmul", "to",
}
# fmt: on
"""Operators that start no kernel."""
BATCH, PROMPT = 4, 6


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    found = counts(args.layers)
    headings = ("decode step", "operations", "products", "fused", "other", "s to compile")
    cells = [[name, *(str(value) for value in row.values())] for name, row in found.items()]
    print(f"{args.layers} layers\n{text_table(headings, cells)}")
    if args.record:
        record.append(NAME, {"layers": args.layers, "counts": found})


@torch.no_grad()
def counts(n_layers: int) -> dict[str, dict[str, int | float]]:
    """Operations of a decode step by kind, eager and compiled."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
    )
    model = prepare_backbone(Qwen3ForCausalLM(config).eval())
    input_ids = torch.randint(1, 64, (BATCH, PROMPT))
    positions = torch.arange(PROMPT).expand(BATCH, -1)
    cache = SlotCache(CacheSpec.dense(), n_layers, BATCH, PROMPT + 8, input_ids.device)
    with cache.prefill(range(BATCH), torch.ones_like(input_ids, dtype=torch.bool)):
        hidden_states(model, input_ids, positions, slot_cache=cache)

    def step() -> None:
        cache.advance()
        hidden_states(model, input_ids[:, :1], positions[:, -1:] + 1, slot_cache=cache)

    found: dict[str, dict[str, int | float]] = {"eager": {**counted(step), "compile_s": 0.0}}
    with inductor_config.patch({"cpp.enable_kernel_profile": True}), CompiledLayers(model):
        started_at = time.perf_counter()
        step()
        elapsed_s = round(time.perf_counter() - started_at, 1)
        found["compiled"] = {**counted(step), "compile_s": elapsed_s}
    return found


def counted(step) -> dict[str, int]:
    """Operations of one call, without those of the attention over the cache."""
    attend = SlotLayer.attend

    def marked(*args, **kwargs):
        with record_function(ATTENTION):
            return attend(*args, **kwargs)

    SlotLayer.attend = marked
    try:
        with profile() as profiler:
            step()
    finally:
        SlotLayer.attend = attend
    names = [event.name for event in profiler.events() if is_operation(event)]
    n_products = sum(name in PRODUCTS for name in names)
    n_fused = sum(FUSED in name for name in names)
    return {
        "operations": len(names),
        "products": n_products,
        "fused": n_fused,
        "other": len(names) - n_products - n_fused,
    }


def is_operation(event: FunctionEvent) -> bool:
    """True for the innermost operator of a call that does work outside of attention."""
    is_fused = FUSED in event.name
    is_operator = event.name.startswith("aten::") and event.name.removeprefix("aten::") not in NO_WORK
    parent, is_inside = event.cpu_parent, False
    while parent is not None:
        is_inside |= parent.name == ATTENTION
        # An operator that another one calls, such as the copy of a conversion, is the same kernel.
        is_inside |= parent.name.startswith("aten::") and parent.name.removeprefix("aten::") not in NO_WORK
        parent = parent.cpu_parent
    return (is_fused or is_operator) and not is_inside


if __name__ == "__main__":
    main()
