"""Inputs and eviction tables for the tests of shadow attention; errors in units of plain PyTorch's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.shadow_attention import SlotPlan, plan_slots, reference
from lit_rlkv.types import NEVER
from tests.kernels.accuracy import excess_error

NAMES = ("out", "lse", "d_query", "d_key", "d_value")
Attention = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """Inputs of one call, and weights with which its two outputs are summed before differentiation."""

    query: Tensor
    key: Tensor
    value: Tensor
    evicted_at: Tensor
    out_weight: Tensor
    lse_weight: Tensor
    softcap: float | None = None

    @property
    def scaling(self) -> float:
        return self.query.shape[-1] ** -0.5

    def to(self, target: torch.dtype | str) -> "Case":
        """Return a copy in another dtype (floating-point tensors) or on another device."""
        is_dtype = isinstance(target, torch.dtype)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {k: v.to(target) for k, v in tensors.items() if v.is_floating_point() or not is_dtype}
        return replace(self, **moved)


def make_case(
    seq: int,
    group: int,
    evicted_at: Tensor,
    *,
    n_kv_heads: int = 2,
    dim: int = 16,
    dim_v: int = 8,
    softcap: float | None = None,
) -> Case:
    """Float64 inputs, laid out as transformers' projections write them: [batch seq head dim] in memory."""
    generator = torch.Generator().manual_seed(seq)

    def normal(n_heads: int, width: int) -> Tensor:
        by_position = torch.randn(
            len(evicted_at), seq, n_heads, width, generator=generator, dtype=torch.float64
        )
        return by_position.transpose(1, 2)

    n_heads = n_kv_heads * group
    return Case(
        query=3 * normal(n_heads, dim),
        key=normal(n_kv_heads, dim),
        value=normal(n_kv_heads, dim_v),
        evicted_at=evicted_at,
        out_weight=normal(n_heads, dim_v),
        # Much, because through the output a key seen alone gets no gradient but what roundings leave of it.
        lse_weight=4 * normal(n_heads, 1)[..., 0],
        softcap=softcap,
    )


def random_evictions(seq: int, batch: int = 2, n_kv_heads: int = 2) -> Tensor:
    """Most keys are evicted early, some are never cached, a tenth stays; row 1 is left-padded."""
    generator = torch.Generator().manual_seed(seq)
    shape = (batch, n_kv_heads, seq)
    lifetime = torch.randint(0, max(2, seq // 3), shape, generator=generator)
    is_kept = torch.rand(shape, generator=generator) < 0.1
    evicted_at = torch.where(is_kept, NEVER, torch.arange(seq) + lifetime).int()
    evicted_at[1:, :, : seq // 4] = 0
    return evicted_at


def cache_evictions(
    seq: int,
    prompt_lens: tuple[int, ...] = (9, 4),
    n_kv_heads: int = 2,
    budget: int = 12,
    interval: int = 5,
    n_sinks: int = 2,
) -> Tensor:
    """Return the eviction table of a cache that keeps random keys; prompts are left-padded."""
    generator = torch.Generator().manual_seed(seq)
    width = max(prompt_lens)
    evicted_at = torch.zeros(len(prompt_lens), n_kv_heads, seq, dtype=torch.int32)
    for row, n_prompt in enumerate(prompt_lens):
        for head in range(n_kv_heads):
            alive = list(range(width - n_prompt, width))
            evicted_at[row, head, width - n_prompt :] = NEVER
            for position in range(width - 1, seq):
                alive += [position] if position >= width else []
                is_full = len(alive) >= (budget + interval if position >= width else budget + 1)
                if is_full:
                    order = torch.randperm(len(alive) - n_sinks, generator=generator) + n_sinks
                    kept = {*range(n_sinks), *order[: budget - n_sinks].tolist()}
                    evicted_at[row, head, [k for i, k in enumerate(alive) if i not in kept]] = position + 1
                    alive = [k for i, k in enumerate(alive) if i in kept]
    return evicted_at


def layer_plan(evicted_at: Tensor, block: int) -> SlotPlan:
    """The plan of a table [batch kv_head seq], also where it would not pay."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("MAX_WORK", "MAX_ENTRIES"):
            patch.setattr(f"lit_rlkv.kernels.shadow_attention.plan.{limit}", float("inf"))
        plan = plan_slots(evicted_at[:, None], block)
    assert plan is not None
    return plan.layer(0)


def with_gradients(attention: Attention, case: Case, **settings: object) -> list[Tensor]:
    """Return output, log-sum-exp (0 if no key is visible) and the gradients of a weighted sum of both."""
    inputs = [t.detach().requires_grad_() for t in (case.query, case.key, case.value)]
    out, lse = attention(*inputs, case.evicted_at, case.scaling, softcap=case.softcap, **settings)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    total = (out * case.out_weight).sum() + (lse * case.lse_weight).sum()
    return [t.detach().cpu() for t in (out, lse, *torch.autograd.grad(total, inputs))]


def excess_errors(
    attention: Attention, case: Case, dtype: torch.dtype, **settings: object
) -> dict[str, float]:
    """Return the largest errors of outputs and gradients against float64, in units of the definition's."""
    rounded = case.to(dtype)
    truths = with_gradients(reference.shadow_attention_with_lse, rounded.to(torch.float64))
    plain = with_gradients(reference.shadow_attention_with_lse, rounded)
    actual = with_gradients(attention, rounded, **settings)
    n_groups = case.query.shape[1] // case.key.shape[1]
    logits = case.scaling * case.query.double() @ case.key.double().repeat_interleave(n_groups, dim=1).mT
    # The backward recomputes the logits that the log-sum-exp of the forward normalises.
    recomputed = max(1.0, float(logits.abs().max()))
    conditions = (1.0, 1.0, recomputed, recomputed, recomputed)
    four = zip(actual, plain, truths, conditions, strict=True)
    return dict(zip(NAMES, (excess_error(*each) for each in four), strict=True))
