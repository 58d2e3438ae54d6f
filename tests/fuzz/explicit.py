"""A rollout once more without this package: transformers' models, own attention under an explicit mask.

Every eviction is also recomputed from the keys, values and queries of that forward.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.types import Rollout
from tests.kvcache.published import Head, gkv_memory, scores_of_layer

NAME = "explicit_mask"


@dataclass
class Layers:
    """What a query sees in each layer, and what the attention of each layer was given: float, by layer."""

    is_seen: Tensor
    """[row, layer, kv_head, query, key]"""
    rows: Mapping[int, int] | None = None
    """Place of each layer in `is_seen`; None: its own number."""
    queries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    probs: dict[int, Tensor] = field(default_factory=dict)
    scaling: float = 1.0
    kv_dtype: str | None = None
    """`CacheSpec.dtype` of the rollout's cache."""
    balance: tuple[Tensor, ...] = ()
    """Divisors of the keys of each layer in the table."""
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[row, column, token]: logits / temperature after each column."""

    def of(self, layer: int, table: Tensor) -> Tensor:
        """A layer's part [row, kv_head, ...] of a table, whose heads are repeated for layers with fewer."""
        found = table[:, layer if self.rows is None else self.rows[layer]]
        return found[:, :: found.shape[1] // self.keys[layer].shape[1]]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    layers: Layers,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    n_groups = query.shape[1] // key.shape[1]
    if layers.kv_dtype is not None:
        of_layer = layer if layers.rows is None else layers.rows[layer]
        balance = layers.balance[of_layer][:, None] if layers.balance else 1.0
        key, value = (
            x + (nearest(x.detach() / by, layers.kv_dtype) * by - x).detach()
            for x, by in ((key, balance), (value, 1.0))
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query @ key.repeat_interleave(n_groups, 1).transpose(2, 3) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    layers.queries[layer], layers.keys[layer] = query.detach(), key.detach()
    is_seen = layers.of(layer, layers.is_seen).repeat_interleave(n_groups, 1)
    # A query of padding sees nothing; its row of -inf would be NaN.
    logits = logits.masked_fill(~is_seen, -1e30)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    probs = logits.softmax(-1)[..., : key.shape[2]] * is_seen
    layers.values[layer], layers.probs[layer] = value.detach(), probs.detach()
    layers.scaling = scaling
    out = probs @ value.repeat_interleave(n_groups, 1)
    return out.transpose(1, 2).contiguous(), None


def nearest(x: Tensor, kv_dtype: str) -> Tensor:
    """The nearest numbers that codes can stand for, in the precision of the definition."""
    if kv_dtype == "int4":
        groups = turned(x.float()).split(32, dim=-1)
        return turned(torch.cat([in_4_bits(group) for group in groups], dim=-1)).to(x.dtype)
    x32, n_steps = x.float(), {"int8": 127, "fp8": 448}[kv_dtype]
    step = (x32.abs().amax(-1, keepdim=True) / n_steps).bfloat16().float()
    place = (x32 / step).nan_to_num().clamp(-n_steps, n_steps)
    place = place.to(torch.float8_e4m3fn).float() if kv_dtype == "fp8" else place.round()
    return (place * step).to(x.dtype)


def in_4_bits(x: Tensor) -> Tensor:
    zero = x.amin(-1, keepdim=True).bfloat16().float()
    step = ((x - zero).amax(-1, keepdim=True) / 15).bfloat16().float()
    return ((x - zero) / step).nan_to_num().clamp(0, 15).round() * step + zero


def turned(x: Tensor) -> Tensor:
    """Hadamard's matrix times each block of the largest power of two that divides the dimensions."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while x.shape[-1] % (2 * len(matrix)) == 0:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    blocks = x.double().unflatten(-1, (-1, len(matrix))) @ matrix / len(matrix) ** 0.5
    return blocks.flatten(-2).float()


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)  # what it makes is not read


def seen(rollout: Rollout) -> Tensor:
    """[row, layer, kv_head, query, key]: real keys of earlier columns and the own one, not evicted yet."""
    column = torch.arange(rollout.input_ids.shape[1])
    is_causal = column <= column[:, None]
    is_real = rollout.attention_mask[:, None, None, :, None] & rollout.attention_mask[:, None, None, None]
    return is_causal & is_real & (column[:, None] < rollout.evicted_at[..., None, :])


def log_probs(
    model: PreTrainedModel, rollout: Rollout, temperature: float, rows: Mapping[int, int] | None = None
) -> tuple[Tensor, Layers]:
    """Log-probs of the response tokens in the rollout's columns, 0 elsewhere; and what the attention saw."""
    codes = rollout.record.codes
    layers = Layers(seen(rollout), rows)
    if codes is not None:
        layers.kv_dtype, layers.balance = codes.dtype, codes.balance
    model.set_attn_implementation(NAME)
    mask = rollout.attention_mask.long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(
        rollout.input_ids, attention_mask=mask, position_ids=positions, use_cache=False, layers=layers
    ).logits
    logits = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    layers.logits = logits.detach()
    for row, column, kept in sets(rollout):
        dropped = [token for token in range(logits.shape[-1]) if token not in kept]
        logits = logits.index_put(
            (torch.tensor(row), torch.tensor(column - 1), torch.tensor(dropped, dtype=torch.long)),
            torch.tensor(-torch.inf, dtype=logits.dtype),
        )
    logps = logits.log_softmax(-1)
    chosen = logps.gather(2, rollout.input_ids[:, 1:, None])[..., 0]
    padded = torch.cat([torch.zeros_like(chosen[:, :1]), chosen], 1)
    return padded.masked_fill(~rollout.response_mask, 0.0), layers


def gradient_errors(model: nn.Module, own_model: nn.Module) -> dict[str, float]:
    """Largest error of each parameter's gradient, relative to the largest of the parameter, at least 1e-2."""
    theirs = dict(own_model.named_parameters())
    errors = {}
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        if parameter.grad is None or expected is None:
            assert parameter.grad is expected, name
            continue
        error = (parameter.grad - expected).abs().max() / expected.abs().max().clamp(min=1e-2)
        errors[name] = float(error)
    return errors


def sets(rollout: Rollout) -> list[tuple[int, int, set[int]]]:
    """Row, column and recorded ids of each response token; none without a record."""
    masks = rollout.record.sampling_masks
    if masks is None:
        return []
    ids, found = iter(masks.token_ids.tolist()), []
    for row, counts in enumerate(masks.counts.tolist()):
        for column, n in enumerate(counts):
            if n > 0:
                found.append((row, column, {next(ids) for _ in range(n)}))
    return found


def wrong_sets(
    rollout: Rollout,
    layers: Layers,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    tolerance: float = 1e-4,
) -> list[str]:
    """Say where the record is not that of the definition; sums closer than `tolerance` may go either way."""
    wrong = []
    for row, column, kept in sets(rollout):
        logits = layers.logits[row, column - 1]
        probs = sorted(logits.double().softmax(-1).tolist(), reverse=True)
        lost = [float(logits[token]) for token in range(len(logits)) if token not in kept]
        if lost and max(lost) > min(float(logits[token]) for token in kept) + tolerance:
            wrong.append(f"row {row} column {column}: a dropped token is likelier than a kept one")
        fewest = _size(probs, top_k, top_p - tolerance, min_p * (1 + tolerance))
        most = _size(probs, top_k, top_p + tolerance, min_p * (1 - tolerance))
        if not fewest <= len(kept) <= most:
            wrong.append(f"row {row} column {column}: keeps {len(kept)} tokens, not {fewest} to {most}")
    return wrong


def _size(probs: list[float], top_k: int | None, top_p: float, min_p: float) -> int:
    """How many of the likeliest tokens are kept; the probabilities are in falling order."""
    left = probs[:top_k]
    if top_p < 1:
        total, needed, n = sum(left), 0.0, 0
        while n < len(left) and needed < top_p * total:
            needed += left[n]
            n += 1
        left = left[: max(n, 1)]
    return max(sum(p >= min_p * left[0] for p in left), 1)


def wrong_evictions(
    rollout: Rollout,
    layers: Layers,
    spec: CacheSpec,
    prefill_chunk: int | None = None,
    tolerance: float = 1e-4,
    without: Collection[int] = (),
) -> list[str]:
    """Say where the record is not that of the policy: step by step, head by head, by the published formulas.

    Layers in `without` are not looked at: a window, not the policy, rules there. Keys whose scores are closer
    than `tolerance`, relative to the largest, may change places by kv_dtype.
    """
    wrong = []
    is_given = rollout.attention_mask & ~rollout.response_mask
    for row in range(len(rollout.input_ids)):
        first = int(rollout.attention_mask[row].int().argmax())
        n_prompt = int(rollout.response_mask[row].int().argmax())
        last_query = int(rollout.response_mask[row].nonzero().max()) - 1
        for layer, keys in layers.keys.items():
            if layer in without:
                continue
            evicted_at = layers.of(layer, rollout.evicted_at)[row]
            n_heads = keys.shape[1]
            n_protected = n_prompt - first if spec.protect_prompt else 0
            held: list[list[int]] = [[] for _ in range(n_heads)]
            memory: list[dict[int, float]] = [{} for _ in range(n_heads)]
            for column in range(first, last_query + 1):
                for each in held:
                    each.append(column)
                is_due = len(held[0]) > spec.budget + n_protected and _is_end(
                    is_given[row].tolist(), column, spec.interval, prefill_chunk
                )
                recorded = [
                    [k for k in held[h] if int(evicted_at[h, k]) == column + 1] for h in range(n_heads)
                ]
                if not is_due or column == last_query:  # what no later query could see is not recorded
                    if any(recorded):
                        wrong.append(f"row {row} layer {layer} column {column}: evicts out of turn")
                    held = [[k for k in held[h] if k not in recorded[h]] for h in range(n_heads)]
                    continue
                scores = _scores(layers, row, layer, held, first, n_protected, column, spec, memory)
                for h in range(n_heads):
                    why = _wrong(held[h], recorded[h], scores[h], first, n_protected, column, spec, tolerance)
                    if why:
                        wrong.append(f"row {row} layer {layer} head {h} column {column}: {why}")
                    held[h] = [k for k in held[h] if k not in recorded[h]]
    return wrong


def _is_end(is_given: list[bool], column: int, interval: int, prefill_chunk: int | None) -> bool:
    """True at the end of a chunk of given tokens, and every `interval` sampled ones after them.

    A token before given ones was sampled and is read with them.
    """
    ends = [c for c, (one, next_one) in enumerate(pairwise([*is_given, False])) if one and not next_one]
    if is_given[column] or is_given[column + 1]:
        n_left = min(end for end in ends if end >= column) - column
        return n_left % (prefill_chunk or len(is_given)) == 0
    return (column - max(end for end in ends if end < column)) % interval == 0


def _wrong(
    held: list[int],
    evicted: list[int],
    scores: dict[int, float] | None,
    first: int,
    n_protected: int,
    column: int,
    spec: CacheSpec,
    tolerance: float,
) -> str | None:
    if len(held) - len(evicted) != spec.budget + n_protected:
        return f"keeps {len(held) - len(evicted)} keys"
    n_first = max(spec.sink, n_protected)
    protected = {k for k in held if k < first + n_first or k > column - spec.window}
    if protected & set(evicted):
        return f"evicts protected keys {sorted(protected & set(evicted))}"
    if scores is None:
        return None
    kept = [k for k in held if k not in evicted and k not in protected]
    if not kept or not evicted:
        return None
    best_lost, worst_kept = max(scores[k] for k in evicted), min(scores[k] for k in kept)
    if best_lost - worst_kept > tolerance * max(abs(s) for s in scores.values()):
        return f"evicts a key of score {best_lost} and keeps one of {worst_kept}"
    return None


def _scores(
    layers: Layers,
    row: int,
    layer: int,
    held: list[list[int]],
    first: int,
    n_protected: int,
    column: int,
    spec: CacheSpec,
    memory: list[dict[int, float]],
) -> list[dict[int, float] | None]:
    """Scores of the keys outside the window, by column; None if the policy draws them.

    What G-KV remembers of each head's keys is written to `memory`.
    """
    n_first = max(spec.sink, n_protected)
    if spec.policy == "random":
        return [None] * len(held)
    keys, values, queries = (part[layer][row] for part in (layers.keys, layers.values, layers.queries))
    probs = layers.probs[layer][row]
    n_groups = queries.shape[0] // keys.shape[0]
    window = [c for c in range(column - spec.window + 1, column + 1) if c >= first]
    heads = []
    for h, columns in enumerate(held):
        group = range(h * n_groups, (h + 1) * n_groups)
        received = probs[list(group)].mean(0)  # [query, key]
        heads.append(
            Head(
                keys=[keys[h, k] for k in columns],
                values=[values[h, k] for k in columns],
                positions=columns,
                queries=[[queries[g, c] for c in window] for g in group],
                query_positions=window,
                attention_sum=[float(received[first : column + 1, k].double().sum()) for k in columns],
                last_attention=[float(received[column, k]) for k in columns],
                scaling=layers.scaling,
                budget=spec.budget,
                n_first=sum(k < first + n_first for k in columns),
                previous=[memory[h].get(k, 0.0) for k in columns],
            )
        )
        if spec.policy == "gkv":
            memory[h] = dict(zip(columns, gkv_memory(heads[-1]), strict=False))
    assert isinstance(spec.policy, str)
    found = scores_of_layer(spec.policy, heads)
    older = [[k for k in columns if k <= column - spec.window] for columns in held]
    return [dict(zip(columns, scores, strict=False)) for columns, scores in zip(older, found, strict=True)]
