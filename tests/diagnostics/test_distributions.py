import pytest
import torch

from lit_rlkv.diagnostics.distributions import (
    evenly_spaced_rows,
    layer_kls,
    view_overlap,
)
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.types import NEVER, Record
from tests.hand_built import ARMS, TRUNCATED, make_datamodule, make_roles, plain_logits, replayed, shift

VOCAB = 51


class OneOfTwo(Ranks):
    size = 2

    def __init__(self, rank):
        self.rank = rank


@pytest.fixture(scope="module", params=[{}, TRUNCATED], ids=["whole vocabulary", "truncated"])
def sampled(request):
    """A policy that differs from its backbone, and a rollout of it that lost keys in every layer."""
    roles = shift(make_roles(), std=0.1)
    rollout = make_datamodule(roles, rollout=request.param).collect().rollout
    assert all((rollout.evicted_at[:, layer] < rollout.input_ids.shape[1]).any() for layer in range(2))
    with acting_as(roles, "policy") as backbone:
        yield backbone, rollout


def log_softmax(backbone, rollout, record, temperature):
    """[action, vocab] in float64, by a forward that shares nothing with what is tested."""
    with torch.no_grad():
        return (plain_logits(backbone, rollout, record).double() / temperature).log_softmax(-1)


def both_views(backbone, rollout, temperature=1.0):
    records = (replayed(rollout, shadow=shadow) for shadow in (True, False))
    return tuple(log_softmax(backbone, rollout, record, temperature) for record in records)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_logits", [1, 7 * VOCAB, 10**9])
def test_overlap_in_chunks_is_that_of_the_whole_distributions(sampled, max_logits, temperature):
    backbone, rollout = sampled
    shadow, dense = both_views(backbone, rollout, temperature)
    expected = torch.minimum(shadow.exp(), dense.exp()).sum(-1)
    found = view_overlap(backbone, rollout, temperature, max_logits)
    torch.testing.assert_close(found[rollout.response_mask].double(), expected, rtol=0, atol=2e-6)
    assert expected.min() < 0.95
    assert (found[~rollout.response_mask] == 0).all()


def test_no_more_logits_are_held_than_allowed(sampled):
    backbone, rollout = sampled
    sizes = []
    handle = backbone.get_output_embeddings().register_forward_hook(
        lambda module, args, output: sizes.append(output.numel())
    )
    view_overlap(backbone, rollout, 1.0, max_logits=7 * VOCAB)
    handle.remove()
    assert max(sizes) == 7 * VOCAB
    assert len(sizes) > 10


def test_overlap_notices_evictions_of_one_query_too_early(sampled):
    backbone, rollout = sampled
    right = view_overlap(backbone, rollout, 1.0)
    early = torch.where(rollout.evicted_at == NEVER, NEVER, (rollout.evicted_at - 1).clamp(min=0)).int()
    assert (view_overlap(backbone, rollout.with_record(evicted_at=early), 1.0) - right).abs().max() > 1e-3


def test_a_rollout_that_lost_nothing_overlaps_wholly():
    roles = shift(make_roles(), std=0.1)
    rollout = make_datamodule(roles, correction=ARMS["dense"]).collect().rollout
    with acting_as(roles, "policy") as backbone:
        overlap = view_overlap(backbone, rollout, 1.0)[rollout.response_mask]
        assert (1 - overlap).abs().max() < 1e-5
        assert layer_kls(backbone, rollout, 1.0).abs().max() == 0.0


def test_layers_are_the_kl_of_their_own_evictions(sampled):
    backbone, rollout = sampled
    found = layer_kls(backbone, rollout, 1.0)
    shadow, dense = both_views(backbone, rollout)
    rows = [shadow]
    for layer in (1, 0):
        evicted_at = replayed(rollout).evicted_at.clone()
        evicted_at[:, 1 - layer] = replayed(rollout, shadow=False).evicted_at[:, 0]
        rows.insert(0, log_softmax(backbone, rollout, Record(evicted_at), 1.0))
    for kl, log_p in zip(found, rows, strict=True):
        expected = (log_p.exp() * (log_p - dense).masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
        torch.testing.assert_close(kl.double(), expected, rtol=1e-3, atol=1e-6)
    first, second, both = found.mean(dim=1)
    assert min(first, second, both) > 1e-3
    assert (first - second).abs() > 1e-3


def test_a_layer_without_evictions_moves_nothing_and_the_only_one_with_any_moves_all(sampled):
    backbone, rollout = sampled
    for layer in range(2):
        evicted_at = rollout.evicted_at.clone()
        evicted_at[:, 1 - layer] = NEVER
        found = layer_kls(backbone, rollout.with_record(evicted_at=evicted_at), 1.0)
        assert (found[1 - layer] == 0).all()
        assert torch.equal(found[layer], found[-1])
        assert found[layer].mean() > 1e-3


def test_rows_are_spread_over_the_rollout(sampled):
    _, rollout = sampled
    assert evenly_spaced_rows(rollout, 4).tolist() == [0, 5, 10, 15]
    assert evenly_spaced_rows(rollout, 1).tolist() == [0]
    assert evenly_spaced_rows(rollout, 99).tolist() == list(range(16))


def test_ranks_choose_the_same_rows_as_one_process(sampled):
    _, rollout = sampled
    first, second = (rollout.rows(slice(start, start + 8)) for start in (0, 8))
    for n_rows in (1, 3, 4, 99):
        chosen = [
            evenly_spaced_rows(half, n_rows, OneOfTwo(rank)) for rank, half in enumerate((first, second))
        ]
        assert [*chosen[0].tolist(), *(chosen[1] + 8).tolist()] == evenly_spaced_rows(
            rollout, n_rows
        ).tolist()
