"""Attention from later queries, beside a plain [seq, seq] computation."""

import pytest
import torch

from lit_rlkv.models import future_attention as module
from lit_rlkv.models.attention import AttentionInputs
from lit_rlkv.models.future_attention import future_attention, last_kept

GROUP = 2
IS_TOKEN = torch.tensor([[1] * 9 + [0] * 3, [0] * 4 + [1] * 8]).bool()


def inputs_of(softcap: float | None = None, has_sink: bool = False) -> AttentionInputs:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 12, 8, generator=generator) * 2 for n in (2 * GROUP, 2, 2))
    sink = torch.randn(2 * GROUP, generator=generator) if has_sink else None
    return AttentionInputs(0, query, key, value, 0.4, softcap, None, sink)


def plain(inputs: AttentionInputs, window: int) -> torch.Tensor:
    """m_t by its definition, row by row and head by head, on the row's own tokens."""
    found = torch.zeros(2, 2, 12)
    for row in range(2):
        own = IS_TOKEN[row].nonzero().flatten()
        n = len(own)
        for head in range(2 * GROUP):
            q, k = inputs.query[row, head, own].double(), inputs.key[row, head // GROUP, own].double()
            logits = q @ k.T * inputs.scaling
            if inputs.softcap is not None:
                logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
            logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            if inputs.sink is not None:
                logits = torch.cat([logits, inputs.sink[head].double().expand(n, 1)], dim=1)
            p = logits.softmax(-1)
            for t in range(n):
                m = sum((float(p[d, t]) for d in range(t + window, n)), 0.0) / max(1, n - t - window)
                place = found[row, head // GROUP]
                place[own[t]] = max(float(place[own[t]]), m)
    return found


@pytest.mark.parametrize("block", [1, 2**23])
@pytest.mark.parametrize(("softcap", "has_sink"), [(None, False), (1.5, False), (None, True)])
def test_it_is_the_mean_attention_of_later_queries(monkeypatch, block, softcap, has_sink):
    monkeypatch.setattr(module, "BLOCK_NUMBERS", block)
    inputs = inputs_of(softcap, has_sink)
    found = future_attention(inputs, IS_TOKEN, window=3)
    found = found.masked_fill(~IS_TOKEN[:, None], 0.0)
    torch.testing.assert_close(found, plain(inputs, window=3), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, plain(inputs, window=2), atol=1e-3)


@pytest.mark.parametrize("block", [1, 2**23])
def test_the_edge_is_the_last_key_that_a_teacher_keeps(monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK_NUMBERS", block)
    target = torch.rand(2, 2, 12, generator=torch.Generator().manual_seed(1))
    is_candidate = IS_TOKEN & (torch.arange(12) != 6)
    found = last_kept(target, is_candidate, 3)
    for row in range(2):
        for head in range(2):
            for column in range(12):
                earlier = [t for t in range(column) if is_candidate[row, t]]
                best = sorted(earlier, key=lambda t: -float(target[row, head, t]))[:3]
                assert int(found[row, head, column]) == (best[-1] if len(best) == 3 else -1)
    assert (last_kept(target, is_candidate, 12) == -1).all()


def test_no_block_holds_all_queries_of_a_long_row(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_NUMBERS", 4 * 64 * 8)
    sizes = []
    logsumexp = torch.Tensor.logsumexp

    def note(logits, *args, **options):
        sizes.append(logits.numel())
        return logsumexp(logits, *args, **options)

    monkeypatch.setattr(torch.Tensor, "logsumexp", note)
    query, key = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    inputs = AttentionInputs(0, query, key, key, 0.4, None, None)
    future_attention(inputs, torch.ones(1, 64, dtype=torch.bool), window=3)
    assert max(sizes) == 4 * 64 * 8
    assert sum(sizes) == 4 * 64 * 64
