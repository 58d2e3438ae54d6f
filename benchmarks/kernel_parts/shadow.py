"""Cases of shadow attention, forward and backward: against dense flash attention and FlexAttention."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from kernel_parts import flex
from kernel_parts.accuracy import require_accurate
from kernel_parts.case import Arm, Builders, Case, Setting
from kernel_parts.counts import Work, attention_work
from kernel_parts.evictions import Schedule, n_visible, simulate_evictions
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from lit_rlkv.kernels.shadow_attention import (
    LayerSegments,
    SlotPlan,
    plan_segments,
    plan_slots,
    segment_attention,
    shadow_attention,
)

REAL = dict.fromkeys((16384, 4096, 8192, 32768), (1024, 2048, 4096))
TOY = {96: (16, 32), 160: (16,)}
"""Length to budgets."""
MAX_REFERENCE_SEQ = 8192
"""Beyond it the definition's [seq, seq] mask for each KV head does not fit beside the rest."""


@dataclass(frozen=True)
class Sizes:
    n_heads: int
    n_kv_heads: int
    dim: int
    interval: int
    prompt: int


REAL_SIZES, TOY_SIZES = Sizes(32, 8, 128, 128, 256), Sizes(4, 2, 16, 16, 12)
UNALIGNED_PROMPT = {16384: 300, 96: 15}
"""Length to a prompt with which no compaction falls on the edge of a block of queries."""


CHUNK = 512
"""Queries whose logits the check holds at once."""


@dataclass(frozen=True)
class Inputs:
    """Shapes of one layer and one sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    d_out: Tensor
    evicted_at: Tensor

    @property
    def scaling(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


Attend = Callable[[Inputs], Tensor]


def cases(setting: Setting) -> Builders:
    """Yield a case for each length and budget."""
    for seq, budgets in (TOY if setting.is_toy else REAL).items():
        for budget in budgets:
            if budget >= seq:
                continue  # nothing would ever be evicted
            sizes = TOY_SIZES if setting.is_toy else REAL_SIZES
            label = f"{seq} tokens, budget {budget}"
            yield label, partial(_case, setting, label, seq, budget, sizes)
            if seq in UNALIGNED_PROMPT:
                sizes = replace(sizes, prompt=UNALIGNED_PROMPT[seq])
                label = f"{label}, prompt {sizes.prompt}"
                yield label, partial(_case, setting, label, seq, budget, sizes)


def make_inputs(setting: Setting, seq: int, budget: int, sizes: Sizes) -> Inputs:
    """Random tensors and the evictions of a simulated h2o."""
    window = min(32, budget // 4)
    schedule = Schedule(budget, sizes.interval, window=window, prompt=sizes.prompt)
    evicted_at = simulate_evictions((1, sizes.n_kv_heads), seq, schedule)
    make = partial(setting.random, 1, requires_grad=True)
    return Inputs(
        query=make(sizes.n_heads, seq, sizes.dim, seed=0),
        key=make(sizes.n_kv_heads, seq, sizes.dim, seed=1),
        value=make(sizes.n_kv_heads, seq, sizes.dim, seed=2),
        d_out=setting.random(1, sizes.n_heads, seq, sizes.dim, seed=3),
        evicted_at=evicted_at.to(setting.device),
    )


def _case(setting: Setting, label: str, seq: int, budget: int, sizes: Sizes) -> Case:
    inputs = make_inputs(setting, seq, budget, sizes)
    n_dense = sizes.n_heads * seq * (seq + 1) // 2
    n_pairs = n_visible(inputs.evicted_at) * (sizes.n_heads // sizes.n_kv_heads)
    itemsize = inputs.query.element_size()
    work, dense_work = (
        attention_work(n, 1, sizes.n_heads, sizes.n_kv_heads, seq, sizes.dim, itemsize)
        for n in (n_pairs, n_dense)
    )
    return Case(
        op="shadow_attention",
        label=label,
        sizes={"seq": seq, "budget": budget, **vars(sizes)},
        arms=(
            *_shadow_arms(setting, inputs, work),
            *_segment_arms(inputs, work),
            *_dense_arms(setting, inputs, dense_work),
            *_masked_arms(setting, inputs, work),
        ),
        check=lambda: max(check(label, inputs), check(f"{label}, in segments", inputs, in_segments)),
        bound="matmul",
        inputs=tuple(vars(inputs).values()),
        figures={"visible_share": n_pairs / n_dense},
    )


def both_passes(inputs: Inputs, attend: Attend) -> tuple[Tensor, ...]:
    """Output and gradients."""
    out = attend(inputs)
    return out, *torch.autograd.grad(out, inputs.trained, inputs.d_out)


def shadow(inputs: Inputs, kernels: str, make_plan: Callable[[], SlotPlan | None]) -> Tensor:
    """Ours, with a plan that is given or made here; a table without a plan is followed densely."""
    return shadow_attention(
        *inputs.trained, inputs.evicted_at, inputs.scaling, plan=make_plan(), kernels=kernels
    )


def plan_of(inputs: Inputs) -> SlotPlan | None:
    """Return the plan that a learner makes once for all layers of a micro-batch; here there is one layer."""
    plan = plan_slots(inputs.evicted_at[:, None])
    return None if plan is None else plan.layer(0)


def in_segments(inputs: Inputs, segments: LayerSegments | None = None) -> Tensor:
    """Ours between evictions by torch's flash kernels, with segments that are given or made here."""
    return segment_attention(*inputs.trained, segments or segments_of(inputs), inputs.scaling)


def segments_of(inputs: Inputs) -> LayerSegments:
    """Return the segments of the table.

    Raises:
        ValueError: they would not pay.
    """
    plan = plan_segments(inputs.evicted_at[:, None])
    segments = None if plan is None else plan.layer(0, inputs.key.shape[1])
    if segments is None:
        raise ValueError("the table's segments are too short")
    return segments


def dense(inputs: Inputs, backend: SDPBackend | None) -> Tensor:
    """torch's causal attention; keys are not repeated (enable_gqa)."""
    with sdpa_kernel(backend) if backend is not None else nullcontext():
        return F.scaled_dot_product_attention(
            *inputs.trained, is_causal=True, scale=inputs.scaling, enable_gqa=True
        )


def _shadow_arms(setting: Setting, inputs: Inputs, work: Work) -> tuple[Arm, ...]:
    plan = plan_of(inputs)
    ours = partial(shadow, kernels=setting.timed_kernels)
    make = partial(plan_of, inputs)
    return (
        Arm("shadow", partial(both_passes, inputs, partial(ours, make_plan=lambda: plan)), work),
        Arm("shadow and its plan", partial(both_passes, inputs, partial(ours, make_plan=make)), work),
        Arm("plan alone", make),
    )


def _segment_arms(inputs: Inputs, work: Work) -> tuple[Arm, ...]:
    segments = segments_of(inputs)
    return (
        Arm("segments", partial(both_passes, inputs, partial(in_segments, segments=segments)), work),
        Arm("segments and their plan", partial(both_passes, inputs, in_segments), work),
    )


def _dense_arms(setting: Setting, inputs: Inputs, work: Work) -> tuple[Arm, ...]:
    if setting.device != "cuda":
        return (Arm("dense SDPA", partial(both_passes, inputs, partial(dense, backend=None)), work),)
    flash, cudnn = (
        partial(both_passes, inputs, partial(dense, backend=backend))
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    )
    return Arm("dense flash", flash, work), Arm("dense cuDNN", cudnn, work)


def _masked_arms(setting: Setting, inputs: Inputs, work: Work) -> tuple[Arm, ...]:
    """The same table by FlexAttention, its mask of blocks made apart; and where it fits by a whole mask."""
    if setting.device != "cuda":
        return ()  # FlexAttention has no gradients there, and the definition is what is timed as ours
    arms = _flex_arms(inputs, work) if setting.times_flex else ()
    if inputs.query.shape[2] > MAX_REFERENCE_SEQ:
        return arms
    by_definition = partial(shadow, kernels="reference", make_plan=lambda: None)
    return *arms, Arm("reference", partial(both_passes, inputs, by_definition), work)


def _flex_arms(inputs: Inputs, work: Work) -> tuple[Arm, ...]:
    torch.compiler.reset()  # past some number of recompilations torch would quietly stop to compile
    group = inputs.query.shape[1] // inputs.key.shape[1]
    make_mask = partial(torch.compile(flex.block_mask, dynamic=False), inputs.evicted_at, group)
    mask_once, attend = cache(make_mask), torch.compile(flex_attention, dynamic=False)

    def by_flex(inputs: Inputs) -> Tensor:
        return attend(*inputs.trained, block_mask=mask_once(), scale=inputs.scaling, enable_gqa=group > 1)

    return (
        Arm("FlexAttention's mask", make_mask),
        Arm("FlexAttention", partial(both_passes, inputs, by_flex), work),
    )


def check(label: str, inputs: Inputs, attend: Attend | None = None) -> float:
    """Output and gradients of the last KV head and its query heads, over the whole length, with a plan."""
    plan = plan_of(inputs)
    attend = attend or partial(shadow, kernels="triton", make_plan=lambda: plan)
    kv_head = inputs.key.shape[1] - 1
    group = inputs.query.shape[1] // inputs.key.shape[1]
    out, d_query, d_key, d_value = both_passes(inputs, attend)
    actual = (out[:, -group:], d_query[:, -group:], d_key[:, kv_head:], d_value[:, kv_head:])
    plain = by_chunks(inputs, kv_head, inputs.query.dtype)
    truth = by_chunks(inputs, kv_head, torch.float64)
    names = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
    results = {name: three for name, *three in zip(names, actual, plain, truth, strict=True)}
    return require_accurate(f"shadow_attention, {label}", results)


def by_chunks(inputs: Inputs, kv_head: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Output and gradients of one KV head and its group as torch computes them, some queries at a time."""
    group, seq = inputs.query.shape[1] // inputs.key.shape[1], inputs.query.shape[2]
    heads = slice(kv_head * group, (kv_head + 1) * group)
    query, d_out = (tensor[:, heads].detach().to(dtype) for tensor in (inputs.query, inputs.d_out))
    query.requires_grad_()
    key, value = (
        tensor[:, kv_head : kv_head + 1].detach().to(dtype).requires_grad_()
        for tensor in (inputs.key, inputs.value)
    )
    total = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in (query, query, key, value)]
    step = torch.arange(seq, device=query.device)
    for start in range(0, seq, CHUNK):
        rows = slice(start, start + CHUNK)
        q = step[rows, None]
        is_visible = (step <= q) & (q < inputs.evicted_at[:, kv_head, None, None])
        out = F.scaled_dot_product_attention(
            query[:, :, rows], key, value, attn_mask=is_visible, scale=inputs.scaling, enable_gqa=True
        )
        total[0][:, :, rows] = out.detach().double()
        for sum_, part in zip(
            total[1:], torch.autograd.grad(out, (query, key, value), d_out[:, :, rows]), strict=True
        ):
            sum_ += part.double()
    return tuple(tensor.to(dtype) for tensor in total)
