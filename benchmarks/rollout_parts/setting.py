"""Settings of the rollout benchmarks: a model with random weights, prompts, and a cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from sampled import sample
from shapes import QWEN_1_5B
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.types import Rollout

PAD = 0


@dataclass(frozen=True)
class Preset:
    """A model's shape, and a size of rollout that suits it."""

    shape: dict[str, int]
    dtype: torch.dtype
    batch: int
    prompt: int
    new: int
    budgets: tuple[int, ...]
    interval: int
    window: int


PRESETS = {
    "1.5b": Preset(
        shape=QWEN_1_5B | {"max_position_embeddings": 65_536},
        dtype=torch.bfloat16,
        batch=256,
        prompt=256,
        new=8192,
        budgets=(1024, 512, 2048),
        interval=128,
        window=16,
    ),
    "tiny": Preset(
        shape={
            "vocab_size": 256,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 384,
            "max_position_embeddings": 4096,
        },
        dtype=torch.float32,
        batch=16,
        prompt=16,
        new=256,
        budgets=(16, 32, 64),
        interval=8,
        window=4,
    ),
}


@dataclass(frozen=True)
class Setting:
    """One size of the benchmark."""

    preset: str
    policy: str
    batch: int
    new: int
    rounds: int
    device: torch.device
    compile_layers: bool = False
    n_layers: int | None = None
    """Attributes of the model that differ from the preset."""
    dtype: torch.dtype | None = None

    @property
    def shape(self) -> Preset:
        return PRESETS[self.preset]

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model with the attention of this package."""
        return prepare_backbone(self.plain_model())

    def plain_model(self) -> PreTrainedModel:
        """Return the model as transformers has it, with random weights."""
        torch.manual_seed(0)
        sizes = self.shape.shape | ({"num_hidden_layers": self.n_layers} if self.n_layers else {})
        config = Qwen2Config(**sizes, pad_token_id=PAD)
        with self.device:
            return Qwen2ForCausalLM(config).to(self.dtype or self.shape.dtype).eval()

    def cache(self, budget: int) -> CacheSpec:
        return CacheSpec(
            self.policy, budget=budget, interval=self.shape.interval, sink=4, window=self.shape.window
        )

    def prompts(self, n: int) -> Tensor:
        """The same `n` random prompts at every call."""
        return self.tokens(n, self.shape.prompt)

    def tokens(self, n: int, length: int) -> Tensor:
        """Random tokens [n, length], the same at every call."""
        generator = torch.Generator().manual_seed(1)
        size = (n, length)
        return torch.randint(1, self.shape.shape["vocab_size"], size, generator=generator).to(self.device)

    def roll_out(self, input_ids: Tensor, cache: CacheSpec, **options: Any) -> Rollout:
        """generate() with nothing to end a response but its length, unless told otherwise."""
        options = {"n_tokens": self.new, "compile_layers": self.compile_layers} | options
        return sample(self.model, input_ids, cache, **options)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, with all its work on the device."""
        self._wait()
        started_at = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - started_at

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def dense_bytes(self) -> int:
        """Keys and values of every token of every row."""
        shape = self.shape.shape
        head_dim = shape["hidden_size"] // shape["num_attention_heads"]
        per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim
        return per_token * self.shape.dtype.itemsize * self.batch * (self.shape.prompt + self.new)
