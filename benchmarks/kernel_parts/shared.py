"""Cases of attention to a shared prompt, forward and backward: table 1 of DualKV (arXiv:2605.15422).

N responses of 2,048 tokens follow one prompt. Ours computes the prompt once and gathers its keys from the
flat sequence of all tokens: with all keys, which is what DualKV computes, and under a budget of keys. Beside
it are torch's flash kernels over N rows, each with a copy of the prompt.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from kernel_parts.accuracy import require_accurate
from kernel_parts.case import Arm, Builders, Case, Setting
from kernel_parts.counts import attention_work
from kernel_parts.evictions import NEVER, Schedule, n_visible, simulate_evictions
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_rlkv.kernels.shadow_attention import LayerSegments, plan_segments, reference, segment_attention


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attention in a table."""

    n_heads: int
    n_kv_heads: int
    dim: int
    response: int
    budget: int
    interval: int


REAL_SIZES, TOY_SIZES = Sizes(32, 8, 128, 2048, 1024, 128), Sizes(4, 2, 16, 48, 16, 16)
REAL = ((28, 4096), (28, 16384), (16, 32768), (28, 32768), (16, 65536))
TOY = ((3, 64), (4, 96))
"""Responses and the tokens of their prompt."""
CHECKED = (3, 513)
"""Responses and tokens of the prompt where the definition is computed as well, on CUDA."""


@dataclass(frozen=True)
class Inputs:
    """A prompt and its responses as a flat sequence, and the tokens of each row [response, column]."""

    tensors: tuple[Tensor, Tensor, Tensor]
    place: Tensor
    prompt: int
    scaling: float

    def table(self, sizes: Sizes, budget: int | None) -> Tensor:
        """Return evictions [response, kv_head, column] as a simulated h2o leaves them; no budget: none."""
        (n, seq), n_heads = self.place.shape, sizes.n_kv_heads
        if budget is None:
            return torch.full((n, n_heads, seq), NEVER, dtype=torch.int32, device=self.place.device)
        schedule = Schedule(budget, sizes.interval, window=min(32, budget // 4), prompt=self.prompt)
        return simulate_evictions((n, n_heads), seq, schedule).to(self.place.device)

    def segments(self, table: Tensor) -> LayerSegments:
        """Return the segments of the table's rows, on the flat tokens."""
        is_own = torch.ones_like(self.place, dtype=torch.bool)
        is_own[1:, : self.prompt] = False
        plan = plan_segments(table[:, None], self.place, is_own.flatten().nonzero().flatten())
        segments = None if plan is None else plan.layer(0, table.shape[1])
        assert segments is not None, "the table's segments are too short"
        return segments

    def copied(self) -> list[Tensor]:
        """Return query, key and value in rows, with a copy of the prompt in each."""
        return [
            t[0].detach().transpose(0, 1)[self.place].transpose(1, 2).requires_grad_() for t in self.tensors
        ]


def cases(setting: Setting) -> Builders:
    """Yield a case for each number of responses and length of the prompt."""
    for n, prompt in TOY if setting.is_toy else REAL:
        label = f"{n} responses, prompt {prompt}"
        yield label, partial(_case, setting, label, n, prompt)


def make_inputs(setting: Setting, sizes: Sizes, n: int, prompt: int) -> Inputs:
    """Random tensors in float16 on CUDA, as in the paper."""
    n_tokens = prompt + n * sizes.response
    make = partial(setting.random, 1, requires_grad=True)
    tensors = tuple(
        make(n_heads, n_tokens, sizes.dim, seed=seed)
        for seed, n_heads in enumerate((sizes.n_heads, sizes.n_kv_heads, sizes.n_kv_heads))
    )
    half = torch.float16 if setting.device == "cuda" else setting.dtype
    q, k, v = (t.detach().to(half).requires_grad_() for t in tensors)
    column = torch.arange(prompt + sizes.response, device=setting.device)
    response = sizes.response * torch.arange(n, device=setting.device)[:, None]
    return Inputs((q, k, v), column + response * (column >= prompt), prompt, sizes.dim**-0.5)


def _case(setting: Setting, label: str, n: int, prompt: int) -> Case:
    sizes = TOY_SIZES if setting.is_toy else REAL_SIZES
    inputs = make_inputs(setting, sizes, n, prompt)
    arms, figures = [], {}
    n_again = (n - 1) * sizes.n_kv_heads * prompt * (prompt + 1) // 2  # pairs of copied prompts
    for budget in (None, sizes.budget):
        name = "ours, all keys" if budget is None else f"ours, budget {budget}"
        table = inputs.table(sizes, budget)
        n_pairs = (n_visible(table) - n_again) * (sizes.n_heads // sizes.n_kv_heads)
        n_tokens, itemsize = inputs.tensors[0].shape[2], inputs.tensors[0].element_size()
        work = attention_work(n_pairs, 1, sizes.n_heads, sizes.n_kv_heads, n_tokens, sizes.dim, itemsize)
        arms.append(Arm(name, partial(ours, inputs, inputs.segments(table)), work))
        figures[f"pairs, {name}"] = n_pairs
    arms.append(Arm("flash, copied prompts", partial(flash, inputs, setting.device)))
    n_checked, prompt_checked = CHECKED if setting.device == "cuda" else TOY[0]
    small = partial(make_inputs, setting, sizes, n_checked, prompt_checked)
    return Case(
        op="shared_prompt",
        label=label,
        sizes={"responses": n, "prompt": prompt, **vars(sizes)},
        arms=tuple(arms),
        check=lambda: max(check(small(), sizes, budget) for budget in (None, sizes.budget)),
        bound="matmul",
        inputs=inputs.tensors,
        figures=figures,
    )


def both_passes(attend: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Output and gradients of its sum, as in the paper."""
    out = attend(*leaves)
    return out, *torch.autograd.grad(out.sum(), leaves)


def ours(inputs: Inputs, segments: LayerSegments) -> tuple[Tensor, ...]:
    """Each token once."""
    attend = partial(segment_attention, segments=segments, scaling=inputs.scaling)
    return both_passes(attend, list(inputs.tensors))


def flash(inputs: Inputs, device: str) -> tuple[Tensor, ...]:
    """torch's causal attention over rows; their copies are made within the call."""
    attend = partial(F.scaled_dot_product_attention, is_causal=True, scale=inputs.scaling, enable_gqa=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device == "cuda" else nullcontext():
        return both_passes(attend, inputs.copied())


def check(inputs: Inputs, sizes: Sizes, budget: int | None) -> float:
    """Output and gradients over the flat tokens, against the definition over rows with copied prompts."""
    table = inputs.table(sizes, budget)

    def by_definition(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs.tensors]
        rows = [t[0].transpose(0, 1)[inputs.place].transpose(1, 2) for t in leaves]
        out = reference.shadow_attention(*rows, table, inputs.scaling)
        first = torch.zeros(leaves[0].shape[2], dtype=torch.long, device=out.device)
        cells = torch.arange(inputs.place.numel(), device=out.device)
        first.scatter_reduce_(0, inputs.place.flatten(), cells, "amin", include_self=False)
        out = out.transpose(1, 2).flatten(0, 1)[first].transpose(0, 1)[None]
        return out, *torch.autograd.grad(out.sum(), leaves)

    found = ours(inputs, inputs.segments(table))
    names = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
    three = zip(found, by_definition(found[0].dtype), by_definition(torch.float64), strict=True)
    return require_accurate("shared_prompt", dict(zip(names, three, strict=True)))
