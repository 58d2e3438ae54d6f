"""Cases of the policies' scores, beside the decode steps that pay for them."""

from collections.abc import Callable
from functools import partial

import torch
from kernel_parts.accuracy import require_accurate
from kernel_parts.case import Arm, Builders, Case, Setting
from kernel_parts.counts import score_work
from kernel_parts.pool import REAL, TOY, Pool, decode_arm, due_counts, make_pool
from torch import Tensor

from lit_rlkv.kernels import slot_scores

Score = Callable[[Pool, str], Tensor]
"""A pool and `kernels` to the scores."""
POLICY_OF = {
    "key_norm": "knorm",
    "key_direction_similarity": "keydiff",
    "redundancy": "rkv",
    "mean_window_attention": "snapkv",
    "peak_window_attention": "rkv",
    "expected_attention": "expected",
}
"""Policies by the score that they need; rkv needs two."""
KV_DTYPES = 256
"""Of the largest score in float32, 3e-5 of it: by so much, times the gate's limit, sums in another order may
differ."""


def cases(setting: Setting) -> Builders:
    """Every score, when all rows are due at once and when one is."""
    sizes = TOY if setting.is_toy else REAL
    for n_due in due_counts(sizes):
        for name, policy in POLICY_OF.items():
            label = f"{name} ({policy}), {n_due} of {sizes.batch} rows due"
            yield label, partial(_case, setting, label, name, n_due)


def score(name: str, pool: Pool, kernels: str) -> Tensor:
    """One of the scores over the pool."""
    p = pool
    looked_at = (p.queries, p.keys, p.columns, p.query_columns, p.is_live)
    arguments = {
        "key_norm": (p.keys,),
        "key_direction_similarity": (p.keys, p.is_live),
        "redundancy": (p.keys, p.is_live),
        "mean_window_attention": (*looked_at, p.scaling),
        "peak_window_attention": (*looked_at, p.is_recent, p.scaling),
        "expected_attention": (p.queries, p.keys, p.values, p.is_live, p.scaling),
    }[name]
    compute: Callable[..., Tensor] = getattr(slot_scores, name)
    return compute(*arguments, p.is_due, kernels=kernels)


def _case(setting: Setting, label: str, name: str, n_due: int) -> Case:
    pool = make_pool(setting, n_due)
    sizes, itemsize = pool.sizes, pool.keys.element_size()
    n_products = sizes.group * sizes.window
    if name.startswith("key"):
        n_products = 2
    elif name == "redundancy":
        n_products = sizes.n_slots
    n_vectors = 2 if name == "expected_attention" else 1
    n_flops = 2 * n_products * pool.n_pools * sizes.n_slots * sizes.dim
    work = score_work(pool.n_pools, sizes.n_slots, n_vectors, sizes.dim, itemsize, n_flops)
    ways = dict.fromkeys((setting.timed_kernels, "reference"))
    return Case(
        op="slot_scores",
        label=label,
        sizes=pool.described | {"score": name},
        arms=(
            *(Arm(kernels, partial(score, name, pool, kernels), work) for kernels in ways),
            decode_arm(setting, pool),
        ),
        check=partial(check, label, name, pool),
        bound="matmul" if name == "redundancy" else "copy",
        inputs=pool.tensors,
    )


def check(label: str, name: str, pool: Pool, compute: Callable[..., Tensor] = score) -> float:
    """Against the definition, which computes in float32, in units of 256 roundings of the largest score."""
    actual, truth = compute(name, pool, "triton"), score(name, pool, "reference")
    plain = truth.double() * (1.0 + KV_DTYPES * torch.finfo(torch.float32).eps)
    return require_accurate(f"slot_scores, {label}", {"scores": (actual, plain, truth)})
