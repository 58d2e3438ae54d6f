"""Given tokens in the cache: chunks of one token are decode steps, and neighbours change nothing."""

import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.kvcache.layer_kind import LayerKind
from lit_rlkv.kvcache.scorer import KVScorer, KVShape

KV_HEADS, GROUP, DIM = 2, 2, 8
PROMPT, N_NEW = 5, 19
SIZES = {"budget": 8, "interval": 1, "sink": 1, "window": 3}
KINDS = [LayerKind(), LayerKind(window=6), LayerKind(window=7, in_chunks=True)]
WITHOUT_CHANCE = [name for name, policy in POLICIES.items() if not policy.draws]


def states_of(n_rows: int) -> list[Tensor]:
    """Queries, keys and values of every layer, [layer, row, head, column, dim]."""
    generator = torch.Generator().manual_seed(3)
    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    shapes = [(len(KINDS), n_rows, n, PROMPT + N_NEW, DIM) for n in heads]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def cache_of(policy: str, n_rows: int) -> SlotCache:
    spec = CacheSpec(policy=policy, **SIZES)
    torch.manual_seed(0)
    scorer = KVScorer([KVShape(KV_HEADS, DIM, DIM)] * len(KINDS), hidden=4).requires_grad_(False)
    for number in range(len(KINDS)):
        scorer.layer(number).out.copy_(torch.linspace(-1, 1, 4))
    device = torch.device("cpu")
    options = {"kinds": KINDS, "scorer": scorer, "frequencies": torch.tensor([1.0, 0.1, 0.01])}
    return SlotCache(spec, len(KINDS), n_rows, PROMPT + N_NEW, device, **options)


def attend(cache: SlotCache, states: list[Tensor]) -> Tensor:
    """Return the attention of every layer, with a softcap in the last one."""
    softcaps = (None, None, 2.0)
    return torch.stack(
        [
            layer.attend(*(s[number] for s in states), DIM**-0.5, softcap)
            for number, (layer, softcap) in enumerate(zip(cache.slot_layers, softcaps, strict=True))
        ]
    )


def prefill(cache: SlotCache, states: list[Tensor]) -> None:
    is_prompt = torch.ones(cache.n_rows, PROMPT, dtype=torch.bool)
    cache.begin(range(cache.n_rows), is_prompt)
    with cache.feed(range(cache.n_rows), is_prompt):
        attend(cache, [s[..., :PROMPT, :] for s in states])


def feed(cache: SlotCache, rows: list[int], states: list[Tensor], begins: list[int], n: list[int]) -> Tensor:
    """Feed to each row as many tokens from a column on; return what its last one read."""
    width = max(n)
    is_token = torch.arange(width) >= width - torch.tensor(n)[:, None]
    new = [torch.full((*s.shape[:1], len(rows), s.shape[2], width, DIM), 7.0) for s in states]
    for place, (row, begin, length) in enumerate(zip(rows, begins, n, strict=True)):
        for padded, s in zip(new, states, strict=True):
            padded[:, place, :, width - length :] = s[:, row, :, begin : begin + length]
    with cache.feed(rows, is_token):
        return attend(cache, new)[..., -1, :]


@pytest.mark.parametrize("policy", WITHOUT_CHANCE)
def test_a_chunk_of_one_token_is_a_decode_step(policy: str):
    states, (decoded, fed) = states_of(2), (cache_of(policy, 2), cache_of(policy, 2))
    prefill(decoded, states)
    prefill(fed, states)
    for column in range(PROMPT, PROMPT + N_NEW):
        decoded.advance()
        expected = attend(decoded, [s[..., column : column + 1, :] for s in states])[..., 0, :]
        if decoded.levels.step():
            decoded.evict()
        found = feed(fed, [0, 1], states, [column, column], [1, 1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    rows = torch.arange(2)
    assert torch.equal(fed.evicted_at(rows), decoded.evicted_at(rows))
    if policy == "h2o":  # the one whose scores are sums over steps
        found, expected = (each.slot_layers[0].attention[..., :8] for each in (fed, decoded))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", WITHOUT_CHANCE)
def test_a_row_reads_and_keeps_the_same_whoever_is_fed_beside_it(policy: str):
    states, (together, alone) = states_of(3), (cache_of(policy, 3), cache_of(policy, 3))
    prefill(together, states)
    prefill(alone, states)
    column = [PROMPT] * 3
    for n in ([4, 1, 9], [2, 6, 1], [7, 5, 3]):
        found = feed(together, [2, 0, 1], states, [column[row] for row in (2, 0, 1)], [n[2], n[0], n[1]])
        for place, row in enumerate((2, 0, 1)):
            expected = feed(alone, [row], states, [column[row]], [n[row]])
            torch.testing.assert_close(found[:, place], expected[:, 0], rtol=1e-4, atol=1e-5)
            column[row] += n[row]
    rows = torch.arange(3)
    assert torch.equal(together.evicted_at(rows), alone.evicted_at(rows))
    assert together.levels.level.tolist() == together.n_live.tolist() == [[8, 8, 8]]
