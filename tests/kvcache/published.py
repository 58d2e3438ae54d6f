"""The published scores once more, slowly: one sequence, one KV head, loops over keys, float64, no masks.

`keys` and `values` are those a head still holds, oldest first, at sequence positions `positions`;
`queries[g][w]` are the latest `window` queries of each query head, at `query_positions`.
"""

import cmath
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

FREQUENCIES = (1.0, 0.1, 0.01)
"""Frequencies of RoPE's pairs, in radians per position: 6 numbers of a head are rotated, others are not."""


@dataclass
class Head:
    """Cache content of one KV head of one sequence at an eviction."""

    keys: list[Tensor]
    values: list[Tensor]
    positions: list[int]
    queries: list[list[Tensor]]
    query_positions: list[int]
    attention_sum: list[float]
    last_attention: list[float]
    scaling: float
    budget: int = 0
    n_first: int = 0
    """Keys at the front that are never evicted."""
    previous: list[float] = field(default_factory=list)
    """What G-KV remembers of each key."""

    @property
    def n_older(self) -> int:
        """Keys outside the window."""
        return sum(position < self.query_positions[0] for position in self.positions)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    exps = [math.exp(logit - top) for logit in logits]
    return [e / sum(exps) for e in exps]


def dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def norm(vector: Tensor) -> float:
    return math.sqrt(dot(vector, vector))


def streaming(head: Head) -> list[float]:
    return [float(position) for position in head.positions]


def h2o(head: Head) -> list[float]:
    return head.attention_sum


def tova(heads: list[Head]) -> list[float]:
    return [mean([head.last_attention[k] for head in heads]) for k in range(len(heads[0].keys))]


def knorm(head: Head) -> list[float]:
    return [-norm(key) for key in head.keys]


def keydiff(head: Head) -> list[float]:
    anchor = torch.stack([key.double() / norm(key) for key in head.keys]).mean(0)
    return [-dot(key, anchor) / (norm(key) * norm(anchor)) for key in head.keys]


def snapkv(head: Head) -> list[float]:
    """kvpress: softmax over keys seen, mean over window, avg_pool1d(5) of older keys, mean over group."""
    pooled_of_heads = []
    for queries in head.queries:
        received = [0.0] * head.n_older
        for query, query_position in zip(queries, head.query_positions, strict=True):
            seen = [k for k, position in enumerate(head.positions) if position <= query_position]
            probs = softmax([dot(query, head.keys[k]) * head.scaling for k in seen])
            for k in range(head.n_older):
                received[k] += probs[k] / len(queries)
        padded = [0.0, 0.0, *received, 0.0, 0.0]
        pooled_of_heads.append([sum(padded[k : k + 5]) / 5 for k in range(head.n_older)])
    return [mean(list(scores)) for scores in zip(*pooled_of_heads, strict=True)]


def rkv_importance(head: Head) -> list[float]:
    """R-KV: max of logits over group, softmax over older keys, mean over window, max_pool1d(7)."""
    received = [0.0] * head.n_older
    n_window = len(head.query_positions)
    for w in range(n_window):
        logits = [
            max(dot(queries[w], head.keys[k]) * head.scaling for queries in head.queries)
            for k in range(head.n_older)
        ]
        for k, prob in enumerate(softmax(logits)):
            received[k] += prob / n_window
    return [max(received[max(k - 3, 0) : k + 4]) for k in range(head.n_older)]


def rkv_redundancy(head: Head) -> list[float]:
    """R-KV: cosines but the diagonal and each row's last one above 0.5, mean over rows, softmax over keys."""
    n = len(head.keys)
    rows = []
    for i in range(n):
        row = [dot(head.keys[i], head.keys[j]) / norm(head.keys[i]) / norm(head.keys[j]) for j in range(n)]
        row[i] = 0.0
        duplicates = [j for j in range(n) if row[j] > 0.5]
        if duplicates:
            row[duplicates[-1]] = 0.0
        rows.append(row)
    return softmax([mean([row[j] for row in rows]) for j in range(n)])


def rkv(head: Head) -> list[float]:
    importance, redundancy = rkv_importance(head), rkv_redundancy(head)
    return [0.1 * importance[k] - 0.9 * redundancy[k] for k in range(head.n_older)]


def expected(head: Head) -> list[float]:
    """Mean over the group of softmax(s·μᵀk + s²·kᵀΣk / 2), times ‖v‖."""
    of_heads = []
    for queries in head.queries:
        stacked = torch.stack(queries).double()
        centre = stacked.mean(0)
        covariance = (stacked - centre).T @ (stacked - centre) / len(queries)
        exponents = [
            head.scaling * dot(centre, key) + head.scaling**2 * dot(key, covariance @ key.double()) / 2
            for key in head.keys
        ]
        of_heads.append(softmax(exponents))
    return [mean([probs[k] for probs in of_heads]) * norm(head.values[k]) for k in range(len(head.keys))]


def criticalkv(head: Head, scores: list[float], projections: list[Tensor]) -> list[float]:
    """CriticalKV as kvpress has it: half of the budget by the score, with the window at its top; the rest by
    (score + 1e-4) times the mean over the group of ‖W_o v‖₁, W_o being [hidden, dim_v] of a query head.
    """
    ranked = sorted(range(head.n_first, head.n_older), key=lambda k: -scores[k])
    first_half = ranked[: head.budget // 2 - (len(head.keys) - head.n_older)]
    sizes = [
        mean([float((projection.double() @ value.double()).abs().sum()) for projection in projections])
        for value in head.values
    ]
    return [
        math.inf if k in first_half else (scores[k] + 1e-4) * sizes[k]
        for k in range(head.n_first, head.n_older)
    ]


def vase_chances(head: Head) -> list[float]:
    """VaSE: chances by which keys are drawn, up to a factor: softmax over older keys, mean, avg_pool1d(5)."""
    received = [0.0] * head.n_older
    for queries in head.queries:
        for query in queries:
            probs = softmax([dot(query, key) * head.scaling for key in head.keys[: head.n_older]])
            received = [total + prob for total, prob in zip(received, probs, strict=True)]
    padded = [0.0, 0.0, *received, 0.0, 0.0]
    return [sum(padded[k : k + 5]) / 5 for k in range(head.n_older)]


def vase(head: Head) -> list[float]:
    """VaSE: value ranges of the budget // 4 keys of largest range; the next range for all that are drawn."""
    ranges = [float(value.max()) - float(value.min()) for value in head.values[: head.n_older]]
    competing = sorted(ranges[head.n_first :], reverse=True)
    n_large = head.budget // 4
    return [max(r, competing[n_large]) for r in ranges] if n_large < len(competing) else ranges


def gkv_memory(head: Head) -> list[float]:
    """G-KV: max over group, mean over window, divided by the largest; or 0.8 of what it was, if more."""
    received = [0.0] * head.n_older
    for w, query_position in enumerate(head.query_positions):
        seen = [k for k, position in enumerate(head.positions) if position <= query_position]
        of_heads = [
            softmax([dot(queries[w], head.keys[k]) * head.scaling for k in seen]) for queries in head.queries
        ]
        for k in range(head.n_older):
            received[k] += max(probs[k] for probs in of_heads) / len(head.query_positions)
    return [max(0.8 * old, r / max(received)) for old, r in zip(head.previous, received, strict=False)]


def gkv(head: Head) -> list[float]:
    memory, similar = gkv_memory(head), rkv_redundancy(head)[: head.n_older]
    return [0.5 * memory[k] - 0.5 * similar[k] / max(similar) for k in range(head.n_older)]


def triattention(head: Head, standardize: bool = True) -> list[float]:
    """TriAttention: the authors' formula on queries and keys before RoPE, at positions without padding."""
    now = head.query_positions[-1] + 1
    of_heads = []
    for queries in head.queries:
        before = [
            complex_before_rope(query, position)
            for query, position in zip(queries, head.query_positions, strict=True)
        ]
        centre = [sum(pairs) / len(pairs) for pairs in zip(*before, strict=True)]
        size = [sum(map(abs, pairs)) / len(pairs) for pairs in zip(*before, strict=True)]
        scores = []
        for k in range(head.n_older):
            key, total = complex_before_rope(head.keys[k], head.positions[k]), 0.0
            for f, frequency in enumerate(FREQUENCIES):
                phase = cmath.phase(centre[f] * key[f].conjugate())
                waves = [
                    math.cos(frequency * (now - head.positions[k] + 2**power) + phase) for power in range(17)
                ]
                total += abs(centre[f]) * abs(key[f]) * mean(waves)
                total += (size[f] - abs(centre[f])) * abs(key[f])
            n_rotated = 2 * len(FREQUENCIES)
            rest = torch.stack(queries)[:, n_rotated:].double().mean(0)
            scores.append(total + dot(rest, head.keys[k][n_rotated:]))
        if standardize:
            candidates = scores[head.n_first :]
            std = math.sqrt(mean([(score - mean(candidates)) ** 2 for score in candidates]))
            scores = [(score - mean(candidates)) / max(std, 1e-6) for score in scores]
        of_heads.append(scores)
    return [max(scores) for scores in zip(*of_heads, strict=True)]


def complex_before_rope(vector: Tensor, position: int) -> list[complex]:
    """Undo RoPE's rotation of the numbers d and d + n_pairs."""
    n = len(FREQUENCIES)
    return [
        complex(float(vector[d]), float(vector[d + n])) * cmath.exp(-1j * frequency * position)
        for d, frequency in enumerate(FREQUENCIES)
    ]


PER_HEAD = {
    "streaming": streaming,
    "h2o": h2o,
    "snapkv": snapkv,
    "rkv": rkv,
    "knorm": knorm,
    "keydiff": keydiff,
    "expected": expected,
    "vase": vase,
    "gkv": gkv,
    "triattention": triattention,
}
"""Scores of the keys outside the window; some lists go on into the window, where every key is kept anyway."""


def scores_of_layer(policy: str, heads: list[Head]) -> list[list[float]]:
    """Scores of each KV head; the one policy that joins the heads of a layer is TOVA."""
    if policy == "tova":
        return [tova(heads)] * len(heads)
    return [PER_HEAD[policy](head) for head in heads]
