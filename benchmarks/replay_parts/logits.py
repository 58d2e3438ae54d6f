"""The gap of a small random model by precision, with logits in float32 and rounded to 16 bit."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import record
import torch
from sampled import gap, sample
from text_table import text_table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lit_rlkv import CacheSpec, prepare_backbone, replay_logps

NAME = "rounded_logits"
VOCAB, HIDDEN = 1024, 128
N_NEW = 128
HEAD_SCALE = 20.0
"""Factor on the head's initial weights; log-probs are then about -2, as of a pretrained model."""
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CACHES = {
    "dense": CacheSpec.dense(),
    "snapkv 24+8": CacheSpec("snapkv", budget=24, interval=8, sink=2, window=4),
}


def make_model(dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Return a random Llama of 4 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(HEAD_SCALE)
    return prepare_backbone(model.to(device, dtype).eval())


@contextmanager
def rounded_logits(model: PreTrainedModel) -> Iterator[None]:
    """Round the logits to the precision of the model within a `with` block, as a plain `nn.Linear` does."""

    def in_model_dtype(head: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        return logits.to(model.dtype)

    handle = model.get_output_embeddings().register_forward_hook(in_model_dtype)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def measure(model: PreTrainedModel, cache: CacheSpec, n_rows: int, n_tokens: int) -> dict[str, float]:
    """Return mean, 99th percentile and largest gap of the tokens of a rollout, in nats."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, VOCAB, (n_rows, 16), generator=generator).to(model.device)
    rollout = sample(model, input_ids, cache, n_tokens)
    return gap(replay_logps(model, rollout), rollout)


def gaps(device: str, n_rows: int, n_tokens: int) -> list[dict]:
    """Return the gap of each precision, kind of logits and cache."""
    found = []
    for precision, dtype in PRECISIONS.items():
        model = make_model(dtype, device)
        for logits in ("float32",) if dtype == torch.float32 else ("float32", "rounded"):
            for name, cache in CACHES.items():
                with rounded_logits(model) if logits == "rounded" else nullcontext():
                    measured = measure(model, cache, n_rows, n_tokens)
                found.append({"precision": precision, "logits": logits, "cache": name, **measured})
    return found


def run(asked: argparse.Namespace) -> None:
    """Print and record the gaps."""
    n_rows, n_tokens = asked.batch, asked.new or N_NEW
    found = gaps(asked.device, n_rows, n_tokens)
    keys = ("precision", "logits", "cache")
    values = ("mean", "p99", "max")
    lines = [[*(row[key] for key in keys), *(f"{row[value]:.1e}" for value in values)] for row in found]
    print(f"{n_rows} sequences of {n_tokens} tokens on {asked.device}; |log π − log μ| in nats\n")
    print(text_table((*keys, *values), lines, n_left=len(keys)))
    record.append(NAME, {"on": asked.device, "n_rows": n_rows, "n_tokens": n_tokens, "gaps": found})
