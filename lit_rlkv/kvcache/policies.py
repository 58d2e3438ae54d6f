"""Eviction policies; `lit_rlkv.kvcache.policy` is their interface, also for policies of your own.

To add one here, subclass `Policy`, and add the class to `POLICIES`. A policy in a package of your own needs
no entry: `cache.policy=mypackage.policies.MyPolicy`, with that package in `trusted_modules`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from lit_rlkv.checks import Range
from lit_rlkv.kernels import slot_scores
from lit_rlkv.kvcache.policy import Policy, SlotView
from lit_rlkv.kvcache.scorer import KVScorer, KVShape
from lit_rlkv.kvcache.seeded_draws import BITS, seeded_draws
from lit_rlkv.kvcache.value_norms import EPSILON
from lit_rlkv.settings import DENSE
from lit_rlkv.trust import load_trusted_class

SNAPKV_POOL, RKV_POOL = 5, 7
"""Keys that SnapKV averages over, and R-KV takes the maximum over."""
RKV_IMPORTANCE = 0.1
"""Weight λ of importance in R-KV."""
VASE_SHARE = 4
"""Keys of the budget for each one that VaSE keeps for its large value."""
VASE_LARGE = 1000.0
"""Added to the scores of large values: more than a log-probability with Gumbel noise reaches."""
TRI_DISTANCES = 17
"""Future distances of TriAttention, 1 to 65,536."""
GKV_DECAY, GKV_IMPORTANCE = 0.8, 0.5
"""Part α of its score that a key keeps at the next compaction, and weight λ of that score, in G-KV."""


class Streaming(Policy):
    """Attention sinks and the most recent keys (arXiv:2309.17453).

    score(k) = position of k; the cache itself keeps the sinks.
    """

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return view.columns.float()


class ByAttention(Policy):
    """Base of the policies whose score is attention, never negative, that a value's size may weigh.

    Args:
        value_norms: CriticalKV (arXiv:2502.03805): the half of the budget that `received` scores highest, the
            window included, then the keys of highest (received + 1e-4) · ‖W_o v‖₁. Where sinks leave less
            than that half, `received` alone chooses.
    """

    def __init__(self, value_norms: bool = False) -> None:
        if not isinstance(value_norms, bool):
            raise ValueError(f"value_norms must be true or false, got {value_norms!r}; choose one")
        self.reads_projection = value_norms

    @abstractmethod
    def received(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        """Return the attention of each key."""

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        received = self.received(view)
        if not self.reads_projection:
            return received
        # Sinks and a protected prompt are kept beside the first half.
        ranked = received.masked_fill(view.is_recent, torch.inf)
        ranked = ranked.masked_fill(view.is_first | ~view.is_live, -torch.inf)
        first_half = ranked.topk(min(view.budget // 2, ranked.shape[-1])).indices
        weighed = (received + EPSILON) * view.value_norms
        # Below infinity, which protects keys: sinks and window come first. In the order of `received`.
        rank = torch.arange(1, first_half.shape[-1] + 1, device=received.device)
        most = (torch.finfo(torch.float32).max / rank).expand_as(first_half)
        return weighed.scatter(2, first_half, most.to(weighed.dtype))


class H2O(ByAttention):
    """Keys with the most attention so far, the heavy hitters (arXiv:2306.14048).

    score(k) = Σ of the attention of all queries since k was written, mean over the query group.
    """

    tracks_attention = "sum"

    def received(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.attention is not None
        return view.attention


class SnapKV(ByAttention):
    """Attention of the latest queries, smoothed over neighbouring keys (arXiv:2404.14469).

    score(k) = avgpool5 over k of mean over window queries and group of softmax(q·k·scaling).

    The softmax runs over all keys that a query sees, the pooling over keys outside the window, as in kvpress.
    """

    sees_queries = True

    def received(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.queries is not None
        assert view.query_columns is not None
        window = (view.queries, view.keys, view.columns, view.query_columns, view.is_live)
        attention = slot_scores.mean_window_attention(*window, view.scaling, view.is_due).masked_fill(
            view.is_recent, 0.0
        )
        return F.avg_pool1d(attention, SNAPKV_POOL, stride=1, padding=SNAPKV_POOL // 2)


def importance(view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
    """Return maxpool7 over keys of the mean over window queries of softmax(max over group of q·k·scaling).

    The softmax runs over the keys outside the window, as in the authors' code.
    """
    assert view.queries is not None
    assert view.query_columns is not None
    window = (view.queries, view.keys, view.columns, view.query_columns, view.is_live, view.is_recent)
    attention = slot_scores.peak_window_attention(*window, view.scaling, view.is_due)
    return F.max_pool1d(attention, RKV_POOL, stride=1, padding=RKV_POOL // 2)


def redundancy(view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
    """Return softmax over keys of the mean cosine similarity to the other keys.

    The most recent near-duplicate of a key (cosine above 0.5) is not counted, so the last of a run of equal
    keys is kept.
    """
    return slot_scores.redundancy(view.keys, view.is_live, view.is_due)


class RKV(Policy):
    """R-KV: importance minus redundancy, for repetitive reasoning (arXiv:2505.24133).

    score = λ·importance − (1 − λ)·redundancy, λ = 0.1.
    """

    sees_queries = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return RKV_IMPORTANCE * importance(view) - (1 - RKV_IMPORTANCE) * redundancy(view)


class Tova(ByAttention):
    """Keys that the last query attended to, the same in all heads (arXiv:2401.06104).

    score(k) = attention of the last query to k, mean over all heads of the layer.
    """

    tracks_attention = "last"

    def received(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.attention is not None
        return view.attention.mean(dim=1, keepdim=True).expand_as(view.attention)


class KNorm(Policy):
    """Keys of small norm, which attract attention (arXiv:2406.11430).

    score(k) = −‖k‖₂.
    """

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return -slot_scores.key_norm(view.keys, view.is_due)


class KeyDiff(Policy):
    """Keys that differ most from the others (arXiv:2504.15364).

    score(k) = −cos(k, mean over live keys of k/‖k‖).
    """

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        return -slot_scores.key_direction_similarity(view.keys, view.is_live, view.is_due)


class Expected(ByAttention):
    """Keys with the most attention expected from future queries (Expected Attention, as in kvpress).

    score(k) = mean over group of softmax(μ·k·s + s²·kᵀΣk/2) · ‖v‖, q ~ N(μ, Σ), s the attention scaling.

    The Gaussian is fitted to the latest `window` queries as they were rotated, because a cache recompacts
    every few tokens; kvpress, which compresses a prompt once, fits it before RoPE and averages the rotation
    over 512 positions. With the empirical covariance, s²·kᵀΣk is the variance of the logits over the window,
    so no [dim, dim] is formed. With `value_norms`, ‖W_o v‖ takes the place of ‖v‖, as kvpress advises.
    """

    sees_queries = True

    def received(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.queries is not None
        values = torch.ones_like(view.values[..., :1]) if self.reads_projection else view.values
        return slot_scores.expected_attention(
            view.queries, view.keys, values, view.is_live, view.scaling, view.is_due
        )


class TriAttention(Policy):
    """Keys by the attention that RoPE gives them at future distances from a mean query (arXiv:2604.04921).

    score(k) = max over group of z(s), s = mean over δ = 1, 2, 4, …, 65,536 of q̄·k, with q̄ rotated to column
    now + δ, plus Σ_f (mean |q_f| − |q̄_f|)·|k_f| over the rotated pairs f; z is the z-score over candidates.

    The means are over the latest `window` queries, rotated back, so they follow the policy as it learns; the
    authors fix them before, on any text. Left padding cancels, because distances alone count.

    Args:
        standardize: take z, as TensorRT-LLM does; False: z(s) = s, as the authors' class does.
    """

    sees_queries = True
    reads_rope = True

    def __init__(self, standardize: bool = True) -> None:
        if not isinstance(standardize, bool):
            raise ValueError(f"standardize must be true or false, got {standardize!r}; choose one")
        self.standardize = standardize

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.queries is not None
        assert view.query_columns is not None
        assert view.now is not None
        assert view.frequencies is not None
        dtype = torch.promote_types(view.queries.dtype, torch.float32)
        frequencies, n_rotated = view.frequencies.to(dtype), 2 * len(view.frequencies)
        queries, keys = view.queries.to(dtype), view.keys.to(dtype)
        pairs = torch.complex(*queries[..., :n_rotated].chunk(2, dim=-1))
        age = (view.now[:, None] - view.query_columns)[:, None, None, :, None].to(dtype)
        mean = (pairs * (1j * age * frequencies).exp()).mean(dim=3)
        ahead = 2 ** torch.arange(TRI_DISTANCES, device=keys.device, dtype=dtype)
        turned = mean * (1j * ahead[:, None] * frequencies).exp().mean(dim=0)
        query = torch.cat([turned.real, turned.imag, queries[..., n_rotated:].mean(dim=3)], dim=-1)
        key_size = torch.hypot(*keys[..., :n_rotated].chunk(2, dim=-1))
        scores = query @ keys.mT + (pairs.abs().mean(dim=3) - mean.abs()) @ key_size.mT
        if self.standardize:
            is_candidate = (view.is_live & ~view.is_recent & ~view.is_first)[:, :, None]
            n = is_candidate.sum(-1, keepdim=True).clamp(min=1)
            scores = scores - scores.masked_fill(~is_candidate, 0.0).sum(-1, keepdim=True) / n
            variance = scores.square().masked_fill(~is_candidate, 0.0).sum(-1, keepdim=True) / n
            scores = scores / variance.sqrt().clamp(min=1e-6)
        return scores.amax(dim=2)


class VaSE(Policy):
    """Keys of the largest values, and others drawn by attention (arXiv:2606.03928).

    score(k) = 1000 + r(k) for the budget / 4 keys of largest r(k) = max_d v − min_d v, and log p(k) + Gumbel
    noise for the others, p = avgpool5 over k of mean over window queries and group of softmax(q·k·scaling).

    The highest of log p + noise are a draw without replacement by p. The softmax runs over the keys outside
    the window. Sinks are kept beside the large values; the authors' code counts them among these.
    """

    sees_queries = True
    draws = True

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.queries is not None
        assert view.query_columns is not None
        is_older = view.is_live & ~view.is_recent
        window = (view.queries, view.keys, view.columns, view.query_columns, is_older)
        attention = slot_scores.mean_window_attention(*window, view.scaling, view.is_due)
        pooled = F.avg_pool1d(attention, SNAPKV_POOL, stride=1, padding=SNAPKV_POOL // 2)
        noise = torch.empty_like(pooled).exponential_(generator=view.generator).log()
        drawn = pooled.clamp(min=torch.finfo(pooled.dtype).tiny).log() - noise
        value_range = (view.values.amax(-1) - view.values.amin(-1)).float()
        value_range = value_range.masked_fill(view.is_first | ~is_older, -torch.inf)
        n_large = min(view.budget // VASE_SHARE, value_range.shape[-1])
        largest = value_range.topk(n_large).indices
        is_large = torch.zeros_like(is_older).scatter(2, largest, True) & ~value_range.isinf()
        return torch.where(is_large, VASE_LARGE + value_range, drawn)


class GKV(Policy):
    """G-KV: attention at all compactions, minus redundancy (arXiv:2512.00504).

    score = λ·G − (1 − λ)·redundancy / max redundancy, λ = 0.5, G = max(α · G of the last compaction, local /
    max local), α = 0.8, and local(k) the mean over window queries of max over group of softmax(q·k·scaling).

    The softmax runs over all keys that a query sees, the maxima over keys outside the window, as in the
    authors' code.
    """

    tracks_attention = "renewed"
    sees_queries = True

    def renew(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.attention is not None
        local = peak_attention(view).masked_fill(view.is_recent, 0.0)
        return torch.maximum(GKV_DECAY * view.attention, local / local.amax(-1, keepdim=True))

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.attention is not None
        similar = redundancy(view).masked_fill(view.is_recent, 0.0)
        similar = similar / similar.amax(-1, keepdim=True)
        return GKV_IMPORTANCE * view.attention - (1 - GKV_IMPORTANCE) * similar


def peak_attention(view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
    """Return the mean over window queries of max over group of softmax(q·k·scaling) over the keys seen."""
    assert view.queries is not None
    assert view.query_columns is not None
    total = torch.zeros_like(view.columns, dtype=torch.float32)
    keys = view.keys.float().transpose(-1, -2)
    for number in range(view.queries.shape[3]):  # one at a time, because logits of all would not fit
        logits = view.queries[:, :, :, number].float() @ keys * view.scaling
        is_seen = view.is_live & (view.columns <= view.query_columns[:, number, None, None])
        logits = logits.masked_fill(~is_seen.unsqueeze(2), -torch.inf)
        total += logits.softmax(-1).amax(dim=2)
    return total / view.queries.shape[3]


class Random(Policy):
    """Uniformly random eviction, a baseline.

    score(k) ~ U(0, 1), drawn anew at each compaction and independently for each KV head.

    Args:
        seed: take `seeded_draws` of it, so that seed and rule are the record: see `eviction_logs.from_seed`.
            Rows of equal length then lose the same keys. None: each row draws its own.
    """

    draws = True

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            Range(least=0, most=2**BITS - 1).check("seed", seed, int)
        self.seed = seed
        self.draws = seed is None

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        if self.seed is not None:
            assert view.first is not None
            assert view.now is not None
            positions = view.columns - view.first[:, None, None]
            return seeded_draws(self.seed, view.layer, positions, view.now - view.first)
        shape, device = view.columns.shape, view.columns.device
        return torch.rand(shape, generator=view.generator, device=device, dtype=torch.float32)


class Learned(Policy):
    """Keys by a score that RL trains: eviction as an action.

    score(k) = the layer's `LayerScorer` of key, value and age, plus Gumbel noise if it samples.

    Args:
        samples: draw the survivors, by Gumbel top-k; False keeps the highest scores. Rollouts of RL draw.
        hidden: hidden units of each head's scorer.
    """

    is_trained = True

    def __init__(self, samples: bool = False, hidden: int = 16) -> None:
        if not isinstance(samples, bool):
            raise ValueError(f"samples must be true or false, got {samples!r}; choose one")
        Range(least=1).check("hidden", hidden, int)
        self.draws = samples
        self.hidden = hidden

    def make_scorer(self, shapes: Sequence[KVShape]) -> nn.Module:
        return KVScorer(shapes, self.hidden)

    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        assert view.now is not None
        assert view.scorer is not None
        log_age = (view.now[:, None, None] - view.columns).float().log1p()
        scores = view.scorer(view.keys, view.values, log_age[:, :, None])[:, :, 0]
        if self.draws:
            scores = scores - torch.empty_like(scores).exponential_(generator=view.generator).log()
        return scores


POLICIES: dict[str, type[Policy]] = {
    "streaming": Streaming,
    "h2o": H2O,
    "snapkv": SnapKV,
    "rkv": RKV,
    "tova": Tova,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "expected": Expected,
    "triattention": TriAttention,
    "vase": VaSE,
    "gkv": GKV,
    "random": Random,
    "learned": Learned,
}
UNTRAINED = tuple(name for name, policy in POLICIES.items() if not policy.is_trained)
"""Policies that need no training."""
WITHOUT_OPTIONS = tuple(name for name, policy in POLICIES.items() if policy.__init__ is object.__init__)
"""Policies that take no `policy_options`."""


def load_policy_class(name: str) -> type[Policy]:
    """Return the eviction policy that a name means: one of POLICIES, or a class of a trusted module.

    Raises:
        ValueError: no such policy, its module is not trusted, or the class is not a Policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    if "." not in name:
        names = {name: name for name in (DENSE, *POLICIES)} | {"pyramid": "cache.budget_profile=pyramid"}
        close = get_close_matches(name.lower(), names, 1)
        meant = f" (did you mean {names[close[0]]}?)" if close else ""
        raise ValueError(
            f"unknown cache policy {name!r}{meant}; choose one of {', '.join((DENSE, *POLICIES))}, or name a "
            "class of your own such as mypackage.policies.MyPolicy"
        )
    found = load_trusted_class(name)
    if not issubclass(found, Policy):
        raise ValueError(f"cache policy {name!r} must be a subclass of lit_rlkv.kvcache.policy.Policy")
    return found
