import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.diagnostics.evictions import (
    EvictedAttention,
    evicted_mass,
    fifth_percentile,
    response_queries,
)
from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.attention import AttentionInputs
from lit_rlkv.models.backbone import hidden_states, token_positions
from lit_rlkv.rollout import generate
from lit_rlkv.types import NEVER, Record, Rollout
from tests.models_zoo import FAMILIES, HEADS, LAYERS, PAD, build, ragged_prompts, tiny_config, tiny_model

SPEC = CacheSpec(policy="random", budget=8, interval=3, sink=1, window=3)
UNGROUPED = ("gpt_neox", "gpt2")
CLOSE = {"rtol": 0, "atol": 2e-6}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sampled(model: PreTrainedModel) -> Rollout:
    return generate(
        model,
        *ragged_prompts(),
        cache=SPEC,
        max_new_tokens=16,
        eos_token_id=5,
        pad_token_id=PAD,
        generator=torch.Generator().manual_seed(0),
    )


def probed(model: PreTrainedModel, rollout: Rollout, probe) -> Tensor:
    """The dense forward that a probe looks on at."""
    record = Record.dense(rollout.attention_mask).until(-1)
    positions = token_positions(rollout.attention_mask)[:, :-1]
    with torch.no_grad():
        return hidden_states(model, rollout.input_ids[:, :-1], positions, record=record, probe=probe)


def eager_probabilities(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """[row, layer, head, q, k] of transformers' own eager attention, on all columns but the last."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(
            rollout.input_ids[:, :-1],
            attention_mask=rollout.attention_mask[:, :-1].long(),
            position_ids=token_positions(rollout.attention_mask)[:, :-1],
            output_attentions=True,
            use_cache=False,
        ).attentions
    return torch.stack(found, dim=1)


def dead_of_queries(probs: Tensor, evicted_at: Tensor) -> Tensor:
    """The same probabilities, 0 on the keys that the sampler still had."""
    column = torch.arange(probs.shape[-1])
    is_dead = evicted_at[..., None, :-1] <= column[:, None]
    return probs * is_dead.repeat_interleave(probs.shape[2] // evicted_at.shape[2], dim=2)


@pytest.mark.parametrize(
    ("family", "n_kv_heads"),
    [(family, n) for family in FAMILIES for n in (1, 2, 4) if n == HEADS or family not in UNGROUPED],
)
def test_masses_are_those_of_the_eager_attention_of_transformers(family: str, n_kv_heads: int):
    model = tiny_model(family, n_kv_heads)
    rollout = sampled(model)
    probs = eager_probabilities(build(tiny_config(family, n_kv_heads)), rollout)
    is_query = response_queries(rollout.response_mask)[:, :-1]
    seen = []

    def compare(inputs: AttentionInputs) -> None:
        layer, query, key = inputs.layer, inputs.query, inputs.key
        assert query is not None
        evicted_at, attention_mask = rollout.evicted_at[:, layer, :, :-1], rollout.attention_mask[:, :-1]
        found = evicted_mass(query, key, evicted_at, attention_mask, inputs.scaling, inputs.softcap)
        dead = dead_of_queries(probs, rollout.evicted_at)[:, layer]
        for value, expected in zip(found, (dead.sum(-1), dead.amax(-1)), strict=False):
            torch.testing.assert_close(
                value.transpose(0, 1)[:, is_query], expected.transpose(0, 1)[:, is_query], **CLOSE
            )
        is_top = (dead.amax(-1) > 0) & (dead.amax(-1) == probs[:, layer].amax(-1))
        agree = (found[2] == is_top).transpose(0, 1)[:, is_query].float().mean()
        assert agree > 0.98  # two probabilities may be the same but for rounding
        seen.append(float(dead.sum(-1).transpose(0, 1)[:, is_query].mean()))

    probed(model, rollout, compare)
    assert len(seen) == LAYERS
    assert min(seen) > 0.1  # the comparison is of something


def statistics(model: PreTrainedModel, rollout: Rollout) -> EvictedAttention:
    found = EvictedAttention(rollout, needed=0.1, max_logits=2**10)  # several chunks
    probed(model, rollout, found)
    return found


def expected_kept(rollout: Rollout) -> Tensor:
    """[layer, head, query] by eager attention."""
    probs = eager_probabilities(build(tiny_config("llama")), rollout)
    dead = dead_of_queries(probs, rollout.evicted_at).sum(-1)
    return 1 - dead.permute(1, 2, 0, 3)[:, :, response_queries(rollout.response_mask)[:, :-1]]


def test_statistics_cover_the_queries_that_predicted_response_tokens():
    rollout = sampled(tiny_model())
    found, kept = statistics(tiny_model(), rollout), expected_kept(rollout)
    torch.testing.assert_close(found.stacked("kept"), kept.mean(-1), **CLOSE)
    assert 40 < kept.shape[-1] <= 60  # so that the third smallest is the 5th percentile
    of_queries = kept.mean(dim=(0, 1)).sort().values
    torch.testing.assert_close(found.kept_p05, of_queries[2], **CLOSE)


@pytest.mark.parametrize(
    "changed",
    [
        lambda evicted_at: torch.where(evicted_at < NEVER, evicted_at + 1, evicted_at),
        lambda evicted_at: torch.where((evicted_at < NEVER) & (evicted_at > 0), evicted_at - 1, evicted_at),
        lambda evicted_at: evicted_at.roll(1, dims=1),
        lambda evicted_at: evicted_at.flip(2),
    ],
    ids=["a query later", "a query earlier", "layers swapped", "heads swapped"],
)
def test_the_comparison_notices_a_wrong_table(changed):
    rollout = sampled(tiny_model())
    found = statistics(tiny_model(), rollout.with_record(evicted_at=changed(rollout.evicted_at)))
    gap = (found.stacked("kept") - expected_kept(rollout).mean(-1)).abs().max()
    assert gap > 1e-3 > 100 * CLOSE["atol"]


def test_a_probe_sees_the_same_where_triton_attends():
    rollout = sampled(tiny_model()).to(DEVICE)
    model = prepare_backbone(build(tiny_config("llama")).to(DEVICE))  # not the one that all tests share
    kept = []
    for kernels in ("triton", "reference"):
        with use_kernels(kernels):
            kept.append(statistics(model, rollout).stacked("kept"))
    torch.testing.assert_close(*kept, rtol=0, atol=1e-5)


def one_head(evicted_at: list[int]) -> tuple[Tensor, ...]:
    """Three keys whose logits for the last query are log 1, log 2 and log 5."""
    key = torch.tensor([1.0, 2.0, 5.0]).log()[None, None, :, None]
    query = torch.ones(1, 1, 3, 1)
    return query, key, torch.tensor(evicted_at, dtype=torch.int32)[None, None], torch.ones(1, 3).bool()


def test_mass_matches_hand_arithmetic():
    # Probabilities: query 0: 1. Query 1: 1/3, 2/3. Query 2: 1/8, 2/8, 5/8.
    mass, peak, is_top = evicted_mass(*one_head([2, 2, NEVER]), 1.0, None)
    assert mass.flatten().tolist() == pytest.approx([0, 0, 3 / 8])
    assert peak.flatten().tolist() == pytest.approx([0, 0, 2 / 8])
    assert is_top.flatten().tolist() == [False, False, False]
    mass, peak, is_top = evicted_mass(*one_head([NEVER, 2, NEVER]), 1.0, None, first=1)
    assert mass.flatten().tolist() == pytest.approx([0, 2 / 8])
    mass, peak, is_top = evicted_mass(*one_head([1, NEVER, NEVER]), 1.0, None)
    assert mass.flatten().tolist() == pytest.approx([0, 1 / 3, 1 / 8])


def test_an_evicted_key_with_the_most_attention_is_counted_on_top():
    query, key, _, attention_mask = one_head([NEVER] * 3)
    key = key.flip(2)  # probabilities of query 2: 5/8, 2/8, 1/8; of query 1: 5/7, 2/7
    _, peak, is_top = evicted_mass(
        query, key, torch.tensor([[[2, NEVER, NEVER]]], dtype=torch.int32), attention_mask, 1.0, None
    )
    assert is_top.flatten().tolist() == [False, False, True]
    assert peak.flatten().tolist() == pytest.approx([0, 0, 5 / 8])


def test_scaling_and_softcap_are_those_of_the_layer():
    query, key, evicted_at, attention_mask = one_head([2, 2, NEVER])
    logits = 2.0 * torch.tensor([1.0, 2.0, 5.0]).log()
    expected = (0.7 * (logits / 0.7).tanh()).softmax(0)[:2].sum()
    mass, _, _ = evicted_mass(query, key, evicted_at, attention_mask, 2.0, 0.7)
    assert float(mass[0, 0, 2]) == pytest.approx(float(expected))
    assert abs(float(expected) - 3 / 8) > 0.05


def test_a_table_by_position_starts_with_the_first_response_token():
    rollout = sampled(tiny_model())
    found = statistics(tiny_model(), rollout)
    on_dead = found.stacked("on_dead")[1]
    start = int(rollout.response_mask.any(dim=0).int().argmax())
    kept = torch.zeros(4, LAYERS, rollout.input_ids.shape[1])
    probs = eager_probabilities(build(tiny_config("llama")), rollout)
    kept[:, :, 1:] = dead_of_queries(probs, rollout.evicted_at).sum(-1).mean(2)
    for position, value in enumerate(on_dead.tolist()):
        rows = rollout.response_mask[:, start + position]
        assert value == pytest.approx(float(kept[rows, 1, start + position].mean()), abs=2e-6)
    assert on_dead[:3].max() < 0.2 < on_dead[-3:].min()


@pytest.mark.parametrize(("n", "rank"), [(1, 0), (20, 0), (21, 1), (100, 4)])
def test_five_percent_of_the_entries_do_not_exceed_their_fifth_percentile(n: int, rank: int):
    values = torch.randperm(n).float()
    assert float(fifth_percentile(values)) == rank
