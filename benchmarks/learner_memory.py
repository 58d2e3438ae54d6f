"""Peak memory of a learner's step by what the backward pass keeps.

    python benchmarks/learner_memory.py [--tokens 512 1024 2048] [--record]

A decoder of random weights in float32, with LoRA adapters on all linear layers, reads one row of random
tokens under a budget of 128 keys, forward and backward. Printed are the most bytes of tensors at once above
the weights, for each token of the row: `device_bytes` without, and `host_bytes` of what layers keep in host
memory. On a CPU both are counted there. `step_seconds` are of the process alone, not its neighbours.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import command_line
import record
import torch
from live_bytes import LiveBytes
from text_table import text_table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lit_rlkv import Rollout, prepare_backbone, replay_logps
from lit_rlkv.models import activations
from lit_rlkv.models.activations import Checkpoints
from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter
from lit_rlkv.types import NEVER, Record

NAME = "learner_memory"
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 1024,
}
WAYS = ("all", "inputs", "inputs, tiles", "host, tiles")
"""All activations are kept, or the inputs of layers, with MLPs in tiles, and these in host memory."""
COLUMNS = ("tokens", "device_bytes", "host_bytes", "step_seconds")
BUDGET, INTERVAL, PROMPT, TILE = 128, 64, 64, 64


def make_model(shape: dict[str, int]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = prepare_backbone(Qwen3ForCausalLM(Qwen3Config(**shape)))
    model.requires_grad_(False)
    add_adapter(model, "policy", LoraSpec(rank=8, alpha=16, target_modules="all-linear"))
    return model


def make_rollout(n_tokens: int, shape: dict[str, int]) -> Rollout:
    """Return a row of random tokens, of whose keys a random choice survives each compaction."""
    generator = torch.Generator().manual_seed(n_tokens)
    n_layers, n_heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    evicted_at = torch.full((1, n_layers, n_heads, n_tokens), NEVER, dtype=torch.int32)
    for now in range(PROMPT + INTERVAL, n_tokens, INTERVAL):
        scores = torch.rand((1, n_layers, n_heads, now), generator=generator)
        scores[evicted_at[..., :now] < NEVER] = -1.0
        n_over = max(int((scores[0, 0, 0] >= 0).sum()) - BUDGET, 0)
        alive = scores.where(scores >= 0, 2.0)
        evicted_at.scatter_(-1, alive.argsort(dim=-1)[..., :n_over], now)
    ids = torch.randint(3, shape["vocab_size"], (1, n_tokens), generator=generator)
    is_token = torch.ones_like(ids, dtype=torch.bool)
    return Rollout(
        input_ids=ids,
        attention_mask=is_token,
        response_mask=is_token & (torch.arange(n_tokens) >= PROMPT),
        rollout_logps=torch.zeros(1, n_tokens),
        record=Record(evicted_at),
        kv_bytes=0,
    )


@contextmanager
def apart(meter: LiveBytes) -> Iterator[list[int]]:
    """Within this block, what is kept in host memory does not count; yield its bytes, and their peak."""
    found, own = [0, 0], activations._Kept

    class Counted(own):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.n_bytes = self._copy.nbytes
            meter.live -= self.n_bytes
            found[0] += self.n_bytes
            found[1] = max(found)

        def __del__(self) -> None:
            meter.live += self.n_bytes
            found[0] -= self.n_bytes

    activations._Kept = Counted
    try:
        yield found
    finally:
        activations._Kept = own


def measure(way: str, n_tokens: int, shape: dict[str, int] = SHAPE) -> dict[str, Any]:
    """Return the peaks and the time of a step."""
    activations.TILE = TILE if "tiles" in way else n_tokens
    keeps: Checkpoints = "host" if "host" in way else way != "all"
    on_device, on_host, seconds = peaks(make_model(shape), make_rollout(n_tokens, shape), keeps)
    return {
        "way": way,
        "tokens": n_tokens,
        "device_bytes": round(on_device / n_tokens),
        "host_bytes": round(on_host / n_tokens),
        "step_seconds": round(seconds, 3),
        **{name: shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    }


def peaks(model: PreTrainedModel, rollout: Rollout, keeps: Checkpoints) -> tuple[int, int, float]:
    """Return the bytes of a step above weights and gradients, on device and host, and its seconds."""
    activations.checkpoint_layers(model, keeps)
    layers = lora_layers(model)

    def step() -> None:
        adapter = "policy" if layers else None
        with use_adapter(layers, adapter), activations.checkpointing(model, keeps):
            replay_logps(model, rollout).sum().backward()

    step()  # gradients are there from now on
    started_at = time.process_time()
    step()
    seconds = time.process_time() - started_at
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with LiveBytes([*model.parameters(), *gradients]) as meter, apart(meter) as on_host:
        held = meter.live
        step()
    return meter.peak_bytes() - held, on_host[1], seconds


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    args: argparse.Namespace = parser.parse_args()
    shown = []
    for n_tokens in args.tokens:
        for way in WAYS:
            row = measure(way, n_tokens)
            record.append(NAME, row)
            shown.append([way, *(f"{row[name]:,}" for name in COLUMNS)])
    print(text_table(["layers keep", *COLUMNS], shown))


if __name__ == "__main__":
    main()
