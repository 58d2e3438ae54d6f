import math
from dataclasses import fields, replace
from operator import methodcaller

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kvcache import POLICIES, value_norms
from lit_rlkv.kvcache.policies import (
    RKV,
    UNTRAINED,
    Learned,
    TriAttention,
    importance,
    redundancy,
)
from lit_rlkv.kvcache.policy import Policy, SlotView
from lit_rlkv.kvcache.scorer import KVShape, LayerScorer
from lit_rlkv.kvcache.slots import Slots
from lit_rlkv.kvcache.value_norms import projected_norms
from tests.kernels.accuracy import bound, excess_error
from tests.kvcache import published

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITHOUT_CHANCE = sorted(name for name in UNTRAINED if not POLICIES[name].draws)
WITH_KERNELS = ("snapkv", "rkv", "knorm", "keydiff", "expected")
KV_HEADS, GROUP, DIM, DIM_V = 2, 2, 8, 4
N_PADDING, N_KEYS, WINDOW = 3, 20, 4
SCALING = DIM**-0.5


def make_view(n_padding: int = N_PADDING, n_keys: int = N_KEYS) -> SlotView:
    """Padding with random content, then keys, of which the last WINDOW are recent."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n_slots = n_padding + n_keys
    columns = torch.arange(n_slots).expand(1, KV_HEADS, -1)
    keys = normal(1, KV_HEADS, n_slots, DIM)
    keys[..., 10, :] = keys[..., 7, :] + 0.1  # near-duplicates, for R-KV
    keys[..., 15, :] = keys[..., 7, :] - 0.1
    return SlotView(
        key_slots=Slots.of(keys, None),
        value_slots=Slots.of(normal(1, KV_HEADS, n_slots, DIM_V), None),
        columns=columns,
        is_live=columns >= n_padding,
        is_recent=columns >= n_slots - WINDOW,
        is_first=columns < n_padding + 1,
        budget=12,
        queries=2 * normal(1, KV_HEADS, GROUP, WINDOW, DIM),
        query_columns=torch.arange(n_slots - WINDOW, n_slots)[None],
        attention=normal(1, KV_HEADS, n_slots).abs().masked_fill(columns < n_padding, 0.0),
        scaling=SCALING,
        generator=generator,
        now=torch.tensor([n_slots]),
        scorer=random_scorer(KVShape(KV_HEADS, DIM, DIM_V)),
        frequencies=torch.tensor(published.FREQUENCIES),
    )


def random_scorer(shape: KVShape) -> LayerScorer:
    scorer = LayerScorer(shape, hidden=4).requires_grad_(False)
    generator = torch.Generator().manual_seed(4)
    for parameter in scorer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return scorer


def heads_of(view: SlotView) -> list[published.Head]:
    """The live keys of the view, one list for each KV head."""
    assert view.queries is not None
    assert view.query_columns is not None
    assert view.attention is not None
    heads = []
    for h in range(KV_HEADS):
        live = view.is_live[0, h].nonzero().flatten().tolist()
        attention = view.attention[0, h, live].tolist()
        heads.append(
            published.Head(
                keys=[view.keys[0, h, k] for k in live],
                values=[view.values[0, h, k] for k in live],
                positions=view.columns[0, h, live].tolist(),
                queries=[list(queries) for queries in view.queries[0, h]],
                query_positions=view.query_columns[0].tolist(),
                attention_sum=attention,
                last_attention=attention,
                scaling=view.scaling,
                budget=view.budget,
                n_first=int((view.is_live & view.is_first)[0, h].sum()),
                previous=attention,
            )
        )
    return heads


def older_scores(policy: Policy, view: SlotView) -> Tensor:
    """Scores of the live keys outside the window: [kv_head, key]."""
    if policy.tracks_attention == "renewed":
        view = replace(view, attention=policy.renew(view))
    scores = policy.score(view)
    return scores[view.is_live & ~view.is_recent].view(KV_HEADS, -1)


@pytest.mark.parametrize("name", WITHOUT_CHANCE)
def test_scores_are_the_published_ones(name: str):
    view = make_view()
    expected = torch.tensor([s[: N_KEYS - WINDOW] for s in published.scores_of_layer(name, heads_of(view))])
    torch.testing.assert_close(older_scores(POLICIES[name](), view), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(WITHOUT_CHANCE) - {"streaming"}))
def test_the_comparison_with_the_published_scores_can_fail(name: str):
    view = make_view()
    expected = torch.tensor([s[: N_KEYS - WINDOW] for s in published.scores_of_layer(name, heads_of(view))])
    shifted = older_scores(POLICIES[name](), view).roll(1, dims=-1)
    assert not torch.allclose(shifted, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("standardize", [True, False])
def test_triattention_after_rope_is_the_authors_formula_before_it(standardize: bool):
    view = make_view()
    assert view.queries is not None
    view = replace(
        view,
        queries=view.queries.double(),
        key_slots=Slots.of(view.keys.double(), None),
        value_slots=Slots.of(view.values.double(), None),
        frequencies=torch.tensor(published.FREQUENCIES, dtype=torch.float64),
    )
    expected = torch.tensor(
        [published.triattention(head, standardize) for head in heads_of(view)], dtype=torch.float64
    )
    found = older_scores(TriAttention(standardize), view)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    later = replace(view, now=torch.tensor([N_PADDING + N_KEYS + 1]))  # negative controls
    assert (older_scores(TriAttention(standardize), later) - expected).abs().max() > 1e-2
    assert (older_scores(TriAttention(not standardize), view) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["h2o", "snapkv", "tova", "expected"])
def test_value_norms_choose_the_second_half_of_the_budget_as_criticalkv_does(name: str):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(11, KV_HEADS * GROUP * DIM_V, generator=generator)  # W_o of all heads
    view = replace(make_view(), projection=lambda: weight.T)
    heads = heads_of(view)
    bases = published.scores_of_layer(name, heads)
    if name == "expected":  # kvpress turns its own norm off
        sizes = [[published.norm(value) for value in head.values] for head in heads]
        bases = [[b / v for b, v in zip(*pair, strict=True)] for pair in zip(bases, sizes, strict=True)]
    projections = weight.view(-1, KV_HEADS, GROUP, DIM_V).unbind(1)
    expected = torch.tensor(
        [
            published.criticalkv(*each[:2], list(each[2].unbind(1)))
            for each in zip(heads, bases, projections, strict=True)
        ]
    )
    found = older_scores(POLICIES[name](value_norms=True), view)[:, heads[0].n_first :]
    assert (found > 1e30).sum(dim=1).tolist() == [view.budget // 2 - WINDOW] * KV_HEADS
    torch.testing.assert_close(found.masked_fill(found > 1e30, torch.inf), expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(older_scores(POLICIES[name](), view)[:, heads[0].n_first :], expected)


def test_where_sinks_take_more_than_half_of_the_budget_attention_alone_chooses_the_others():
    view = make_view()
    # 12 keys stay: 7 sinks, 4 of the window, and 1 of the 2 others in the half that attention chooses.
    view = replace(view, is_first=view.columns < N_PADDING + 7, projection=lambda: torch.ones(8, 11))
    assert view.attention is not None
    is_other = ~(view.is_first | view.is_recent)
    best = view.attention.masked_fill(~is_other, -1.0).topk(2).indices
    assert (best[..., 0] > best[..., 1]).any()  # not the earlier of both
    found = POLICIES["h2o"](value_norms=True).score(view).masked_fill(~is_other, -1.0)
    assert torch.equal(found.argmax(dim=-1), best[..., 0])


def test_value_norms_are_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(KV_HEADS * GROUP * DIM_V, 11)
    whole = projected_norms(make_view().values, weight)
    monkeypatch.setattr(value_norms, "MOST_NUMBERS", 11 * 5)
    torch.testing.assert_close(projected_norms(make_view().values, weight), whole)


def test_keys_at_distances_that_rope_favours_outscore_those_that_it_does_not():
    # Queries and keys point the same way before RoPE, so q̄·k is cos ω(t − p + δ) of one slow pair.
    n, frequency = 12, 0.05
    angles = frequency * torch.arange(n)
    rotated = torch.stack([angles.cos(), angles.sin()], dim=-1).double().expand(1, 1, n, 2)
    columns = torch.arange(n).expand(1, 1, n)
    view = SlotView(
        key_slots=Slots.of(rotated, None),
        value_slots=Slots.of(rotated, None),
        columns=columns,
        is_live=columns >= 0,
        is_recent=columns >= n - 2,
        is_first=columns < 0,
        budget=4,
        queries=rotated[:, :, None, n - 2 :],
        query_columns=torch.tensor([[n - 2, n - 1]]),
        attention=None,
        scaling=1.0,
        generator=None,
        now=torch.tensor([n]),
        frequencies=torch.tensor([frequency]),
    )
    expected = [sum(math.cos(frequency * (n - p + 2**power)) for power in range(17)) / 17 for p in range(n)]
    found = TriAttention(standardize=False).score(view)[0, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-3)  # frequencies are of float32
    assert max(expected) - min(expected) > 0.1


def test_standardize_must_be_a_bool():
    with pytest.raises(ValueError, match="standardize must be true or false, got 'no'"):
        TriAttention("no")


def on_device(view: SlotView) -> SlotView:
    found = {f.name: getattr(view, f.name) for f in fields(view)}
    tensors = {name: each.to(DEVICE) for name, each in found.items() if isinstance(each, Tensor)}
    to_device = methodcaller("to", DEVICE)
    pools = {name: each.map(to_device) for name, each in found.items() if isinstance(each, Slots)}
    return replace(view, **tensors, **pools)


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_the_kernels_score_as_accurately_as_the_definitions(name: str):
    view, policy = make_view(), POLICIES[name]()
    truth = torch.tensor(
        [s[: N_KEYS - WINDOW] for s in published.scores_of_layer(name, heads_of(view))], dtype=torch.float64
    )
    with use_kernels("reference"):
        plain = older_scores(policy, view)
    with use_kernels("triton"):
        scores = older_scores(policy, on_device(view)).cpu()
    assert excess_error(scores, plain, truth) <= bound(torch.float32)
    assert excess_error(scores.flip(0), plain, truth) > 10.0


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_row_that_is_not_due_is_not_scored(name: str, kernels: str):
    view = on_device(make_view())
    with use_kernels(kernels):
        scores = POLICIES[name]().score(replace(view, is_due=torch.tensor([True], device=DEVICE)))
        assert torch.equal(scores, POLICIES[name]().score(view))
        assert (POLICIES[name]().score(replace(view, is_due=torch.tensor([False], device=DEVICE))) == 0).all()


@pytest.mark.parametrize("name", WITHOUT_CHANCE)
def test_padding_changes_no_score(name: str):
    bare = make_view(n_padding=0)
    padded = SlotView(
        key_slots=Slots.of(torch.cat([torch.full((1, KV_HEADS, 5, DIM), 9.0), bare.keys], dim=2), None),
        value_slots=Slots.of(torch.cat([torch.full((1, KV_HEADS, 5, DIM_V), 9.0), bare.values], dim=2), None),
        columns=torch.arange(N_KEYS + 5).expand(1, KV_HEADS, -1),
        is_live=torch.arange(N_KEYS + 5).expand(1, KV_HEADS, -1) >= 5,
        is_recent=torch.arange(N_KEYS + 5).expand(1, KV_HEADS, -1) >= N_KEYS + 5 - WINDOW,
        is_first=torch.arange(N_KEYS + 5).expand(1, KV_HEADS, -1) < 6,
        budget=bare.budget,
        queries=bare.queries,
        query_columns=None if bare.query_columns is None else bare.query_columns + 5,
        attention=None if bare.attention is None else torch.nn.functional.pad(bare.attention, (5, 0)),
        scaling=bare.scaling,
        generator=None,
        now=torch.tensor([N_KEYS + 5]),
        frequencies=bare.frequencies,
    )
    shift = 5.0 if name == "streaming" else 0.0
    torch.testing.assert_close(
        older_scores(POLICIES[name](), padded),
        older_scores(POLICIES[name](), bare) + shift,
        rtol=1e-5,
        atol=1e-6,
    )


def test_rkv_calls_a_repeated_key_redundant_but_spares_its_last_copy():
    # Equal keys a, b, c in slots 0, 2, 4 and three orthogonal ones. Zeroed are the diagonal and in each row
    # the last duplicate. So rows a and b lose c and keep each other, and row c loses b and keeps a.
    # Column means: a 2/6, b 1/6, c 0, others 0.
    axes = torch.eye(8)
    keys = torch.stack([axes[0], axes[1], axes[0], axes[2], axes[0], axes[3]])[None, None]
    view = view_of_keys(keys)
    raw = torch.tensor([2 / 6, 0, 1 / 6, 0, 0, 0])
    torch.testing.assert_close(redundancy(view)[0, 0], raw.exp() / raw.exp().sum())


def test_rkv_weighs_importance_a_tenth_and_redundancy_nine():
    view = make_view()
    torch.testing.assert_close(RKV().score(view), 0.1 * importance(view) - 0.9 * redundancy(view))


def test_knorm_prefers_short_keys_and_keydiff_the_odd_one_out():
    # Norms 5, 1, 2; the first two keys point along x, the third along y.
    keys = torch.tensor([[5.0, 0.0], [1.0, 0.0], [0.0, 2.0]])[None, None]
    view = view_of_keys(keys)
    assert POLICIES["knorm"]().score(view)[0, 0].tolist() == [-5.0, -1.0, -2.0]
    # Mean of the unit keys: (2/3, 1/3), of length sqrt(5)/3, so cosines 2/sqrt(5), 2/sqrt(5), 1/sqrt(5).
    root = math.sqrt(5)
    expected = torch.tensor([-2 / root, -2 / root, -1 / root])
    torch.testing.assert_close(POLICIES["keydiff"]().score(view)[0, 0], expected)


def test_tova_gives_all_heads_one_set():
    scores = POLICIES["tova"]().score(make_view())
    assert torch.equal(scores[:, 0], scores[:, 1])


def test_random_scores_follow_the_generator_and_differ_between_heads():
    first, again = (POLICIES["random"]().score(make_view()) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[:, 0], first[:, 1])


def test_vase_keeps_the_largest_values_and_draws_the_others_by_attention():
    view = make_view()
    heads = heads_of(view)
    scores = torch.stack([older_scores(POLICIES["vase"](), view) for _ in range(4000)])
    for h, head in enumerate(heads):
        ranges = torch.stack(head.values).amax(1) - torch.stack(head.values).amin(1)
        competing = ranges[head.n_first : head.n_older]
        large = (competing.topk(view.budget // 4).indices + head.n_first).tolist()
        order = scores[:, h].sort(dim=1, descending=True).indices
        assert (order[:, : len(large)].sort(dim=1).values == torch.tensor(sorted(large))).all()
        others = [k for k in range(head.n_older) if k not in large]
        chances = torch.tensor(published.vase_chances(head))[others]
        counts = (order[:, len(large), None] == torch.tensor(others)).float().mean(0)
        torch.testing.assert_close(counts, chances / chances.sum(), rtol=0, atol=0.03)
        assert not torch.allclose(counts.roll(1), chances / chances.sum(), rtol=0, atol=0.03)


def test_gkv_remembers_a_key_that_was_looked_at_before():
    view, policy = make_view(), POLICIES["gkv"]()
    assert view.attention is not None
    new = replace(view, attention=torch.zeros_like(view.attention))
    first = policy.renew(new)
    assert first.amax(-1).tolist() == [[1.0, 1.0]]
    top = first[0, 0].argmax()
    assert new.queries is not None
    turned = replace(new, queries=(-100 * new.keys[0, 0, top]).expand_as(new.queries))
    later = policy.renew(replace(turned, attention=first))
    latest = policy.renew(replace(turned, attention=later))
    # No query looks at it any more, and of its score 0.8 is left, then 0.64.
    assert [float(each[0, 0, top]) for each in (later, latest)] == pytest.approx([0.8, 0.64])
    assert policy.renew(turned)[0, 0, top] < 1e-6


def view_of_keys(keys: Tensor) -> SlotView:
    columns = torch.arange(keys.shape[2]).expand(*keys.shape[:2], -1)
    return SlotView(
        key_slots=Slots.of(keys, None),
        value_slots=Slots.of(keys, None),
        columns=columns,
        is_live=columns >= 0,
        is_recent=columns < 0,
        is_first=columns < 0,
        budget=2,
        queries=None,
        query_columns=None,
        attention=None,
        scaling=1.0,
        generator=None,
    )


def test_learned_scores_are_those_of_each_heads_network():
    view = make_view()
    found, scorer = Learned().score(view), view.scorer
    assert isinstance(scorer, LayerScorer)
    for head in range(KV_HEADS):
        for slot in range(N_PADDING + N_KEYS):
            key, value = view.keys[0, head, slot], view.values[0, head, slot]
            sizes = [(each.square().sum() / len(each)).sqrt() for each in (key, value)]
            x = torch.cat([key / sizes[0], value / sizes[1], torch.stack(sizes).log()])
            hidden = torch.nn.functional.silu(scorer.weight[head] @ x + scorer.bias[head])
            age = N_PADDING + N_KEYS - slot
            expected = scorer.out[head] @ hidden + scorer.age[head] * math.log(1 + age)
            torch.testing.assert_close(found[0, head, slot], expected, rtol=1e-4, atol=1e-5)


def test_learned_draws_only_if_it_samples_and_is_uniform_before_training():
    view = make_view()
    assert torch.equal(Learned().score(view), Learned().score(view))
    assert not torch.equal(*(Learned(samples=True).score(view) for _ in range(2)))
    start = replace(view, scorer=LayerScorer(KVShape(KV_HEADS, DIM, DIM_V), hidden=4))
    assert (Learned().score(start) == 0).all()
    drawn = torch.stack([Learned(samples=True).score(start)[0, 0].argmax() for _ in range(3000)])
    assert drawn.bincount(minlength=N_PADDING + N_KEYS).min() > 3000 / (N_PADDING + N_KEYS) / 2
