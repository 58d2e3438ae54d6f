import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels import slot_scores
from tests.kernels.accuracy import GROUPS, LENGTHS, bound, excess_error
from tests.tiers import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["reference", "triton"]
BOUND = bound(torch.float32)


@dataclass(frozen=True)
class Shape:
    n_slots: int
    group: int = 2
    window: int = 5
    dim: int = 16
    dim_v: int = 8
    batch: int = 2 if DEVICE == "cpu" else 16  # the more numbers, the less the largest error scatters
    kv_heads: int = 2


@dataclass(frozen=True)
class Inputs:
    """Inputs of all scores."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    columns: Tensor
    query_columns: Tensor
    is_live: Tensor
    is_recent: Tensor
    scaling: float

    def double(self) -> "Inputs":
        return replace(
            self, queries=self.queries.double(), keys=self.keys.double(), values=self.values.double()
        )

    def rows(self, rows: Tensor) -> "Inputs":
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return Inputs(**{n: t[rows] if isinstance(t, Tensor) else t for n, t in tensors.items()})


def make_inputs(shape: Shape, dtype: torch.dtype = torch.float32) -> Inputs:
    """Rows of different padding; every fifth key is a near-duplicate; queries are in a ring buffer."""
    generator = torch.Generator(DEVICE).manual_seed(shape.n_slots)

    def normal(*lead: int) -> Tensor:
        return torch.randn(shape.batch, shape.kv_heads, *lead, generator=generator, device=DEVICE)

    keys = normal(shape.n_slots, shape.dim)
    copies = keys[:, :, 4::5]
    copies.copy_(keys[:, :, 3::5][:, :, : copies.shape[2]] + 0.1 * torch.ones_like(copies))
    # Columns with gaps; the newest keys, one for each query, have none.
    gap = torch.randint(
        1, 4, (shape.batch, shape.kv_heads, shape.n_slots), generator=generator, device=DEVICE
    )
    gap[:, :, -shape.window :] = 1
    columns = gap.flip(-1).cumsum(-1).flip(-1).neg() + 4 * shape.n_slots
    newest = columns[:, 0, -1:]
    ring = torch.arange(shape.window, device=DEVICE).roll(shape.window // 2)
    n_padding = torch.arange(shape.batch, device=DEVICE)[:, None, None] % 3 * (shape.n_slots // 5)
    is_live = (torch.arange(shape.n_slots, device=DEVICE) >= n_padding).expand_as(columns)
    return Inputs(
        queries=2 * normal(shape.group, shape.window, shape.dim).to(dtype),
        keys=keys.to(dtype),
        values=normal(shape.n_slots, shape.dim_v).to(dtype),
        columns=columns,
        query_columns=newest - ring,
        is_live=is_live,
        is_recent=columns > (newest - shape.window)[:, None],
        scaling=shape.dim**-0.5,
    )


Score = Callable[..., Tensor]
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "key_norm": ("keys",),
    "key_direction_similarity": ("keys", "is_live"),
    "redundancy": ("keys", "is_live"),
    "mean_window_attention": ("queries", "keys", "columns", "query_columns", "is_live", "scaling"),
    "peak_window_attention": (
        *("queries", "keys", "columns", "query_columns", "is_live", "is_recent", "scaling"),
    ),
    "expected_attention": ("queries", "keys", "values", "is_live", "scaling"),
}
"""Arguments of each score, in order."""
OF_WINDOW = [name for name, arguments in ARGUMENTS.items() if "queries" in arguments]


def score(name: str, inputs: Inputs, kernels: str, is_due: Tensor | None = None) -> Tensor:
    function: Score = getattr(slot_scores, name)
    return function(*(getattr(inputs, a) for a in ARGUMENTS[name]), is_due, kernels=kernels)


def written_out(name: str, inputs: Inputs) -> Tensor:
    """The definitions once more, in the dtype of the inputs, for each row and head by itself."""
    batch, kv_heads, n_slots, _ = inputs.keys.shape
    scores = inputs.keys.new_zeros(batch, kv_heads, n_slots)
    for b in range(batch):
        for h in range(kv_heads):
            live = inputs.is_live[b, h]
            of_head = OF_HEAD[name](inputs, b, h, live)
            scores[b, h] = of_head if len(of_head) == n_slots else scores[b, h].masked_scatter(live, of_head)
    return scores


def norm_of_head(inputs: Inputs, b: int, h: int, live: Tensor) -> Tensor:
    return inputs.keys[b, h].square().sum(-1).sqrt()


def similarity_of_head(inputs: Inputs, b: int, h: int, live: Tensor) -> Tensor:
    keys = inputs.keys[b, h]
    unit = keys / keys.square().sum(-1, keepdim=True).sqrt()
    direction = unit[live].sum(0)
    return unit @ direction / direction.square().sum().sqrt()


def redundancy_of_head(inputs: Inputs, b: int, h: int, live: Tensor) -> Tensor:
    keys = inputs.keys[b, h, live]
    unit = keys / keys.square().sum(-1, keepdim=True).sqrt()
    cosine = (unit @ unit.T).fill_diagonal_(0.0)
    is_duplicate = cosine > 0.5
    last = torch.where(is_duplicate, torch.arange(len(cosine), device=cosine.device), 0).amax(1, keepdim=True)
    cosine.scatter_(1, last, cosine.gather(1, last).where(~is_duplicate.any(1, keepdim=True), 0.0))
    return cosine.mean(0).softmax(-1)


def logits_of_head(inputs: Inputs, b: int, h: int, live: Tensor) -> Tensor:
    """Return the logits of the live keys: [group, window, key]."""
    return inputs.queries[b, h] @ inputs.keys[b, h, live].T * inputs.scaling


def mean_of_head(inputs: Inputs, b: int, h: int, live: Tensor) -> Tensor:
    is_seen = inputs.columns[b, h, live] <= inputs.query_columns[b][:, None]
    logits = logits_of_head(inputs, b, h, live).where(is_seen, -torch.inf)
    return logits.softmax(-1).mean((0, 1))


def peak_of_head(inputs: Inputs, b: int, h: int, live: Tensor) -> Tensor:
    is_older = ~inputs.is_recent[b, h, live]
    is_seen = inputs.columns[b, h, live] <= inputs.query_columns[b][:, None]
    logits = logits_of_head(inputs, b, h, live).amax(0).where(is_seen & is_older, -torch.inf)
    return logits.softmax(-1).mean(0)


def exponent_of_head(inputs: Inputs, b: int, h: int, live: Tensor) -> Tensor:
    logits = logits_of_head(inputs, b, h, live)
    mean = logits.mean(1)
    return mean + (logits - mean[:, None]).square().mean(1) / 2


def expected_of_head(inputs: Inputs, b: int, h: int, live: Tensor) -> Tensor:
    exponent = exponent_of_head(inputs, b, h, live)
    return exponent.softmax(-1).mean(0) * inputs.values[b, h, live].square().sum(-1).sqrt()


OF_HEAD: dict[str, Callable[[Inputs, int, int, Tensor], Tensor]] = {
    "key_norm": norm_of_head,
    "key_direction_similarity": similarity_of_head,
    "redundancy": redundancy_of_head,
    "mean_window_attention": mean_of_head,
    "peak_window_attention": peak_of_head,
    "expected_attention": expected_of_head,
}


def error(name: str, scores: Tensor, inputs: Inputs) -> float:
    """Return the error against float64, in units of float32's error."""
    own = replace(
        inputs, queries=inputs.queries.float(), keys=inputs.keys.float(), values=inputs.values.float()
    )
    condition = 1.0
    if name == "expected_attention":  # whose exponents have a variance in them
        exact = inputs.double()
        places = itertools.product(range(len(exact.keys)), range(exact.keys.shape[1]))
        exponents = (exponent_of_head(exact, b, h, exact.is_live[b, h]) for b, h in places)
        condition = max(1.0, *(float(each.abs().max()) for each in exponents))
    return excess_error(scores, written_out(name, own), written_out(name, inputs.double()), condition)


@pytest.fixture
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill scratch memory with NaN, or with indices far out of range."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 2**20)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))


SHAPES = [
    Shape(n_slots=LENGTHS[1], group=GROUPS[0], window=1),
    Shape(n_slots=LENGTHS[2], group=GROUPS[1], window=3, dim=20),
    Shape(n_slots=LENGTHS[3], group=GROUPS[3], window=16, kv_heads=1),
    # More queries and more slots than one block holds.
    Shape(n_slots=LENGTHS[4], group=GROUPS[2], window=40, dim=8, dim_v=12),
]
SHORT = {(1, torch.float32), (3, torch.float16)}
"""Shapes and precisions of the short tier."""
ACCURACY_CASES = [
    (shape, dtype) if (i, dtype) in SHORT else slow(shape, dtype)
    for i, shape in enumerate(SHAPES)
    for dtype in (torch.float32, torch.float16)
]
AT_REAL_SIZE = Shape(n_slots=1152, group=4, window=16, dim=128, dim_v=128, batch=64, kv_heads=8)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize(("shape", "dtype"), ACCURACY_CASES)
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_scores_are_as_accurate_as_float32(name: str, kernels: str, dtype: torch.dtype, shape: Shape):
    inputs = make_inputs(shape, dtype)
    assert error(name, of_live_keys(score(name, inputs, kernels), inputs, name), inputs) <= BOUND


def of_live_keys(scores: Tensor, inputs: Inputs, name: str) -> Tensor:
    """Set the scores of padding to 0, except for scores that are defined for all keys."""
    return scores if name.startswith("key") else scores.masked_fill(~inputs.is_live, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_scores_are_as_accurate_as_float32_at_real_size(name: str, dtype: torch.dtype):
    inputs = make_inputs(AT_REAL_SIZE, dtype)
    rows = torch.tensor([0, 1, 63], device=DEVICE)
    scores = score(name, inputs, "triton")[rows]
    few = inputs.rows(rows)
    assert error(name, of_live_keys(scores, few, name), few) <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 256])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_scores_are_as_accurate_as_float32_at_every_width(name: str, dim: int):
    inputs = make_inputs(replace(AT_REAL_SIZE, batch=3, dim=dim, dim_v=dim, window=64), torch.bfloat16)
    assert error(name, of_live_keys(score(name, inputs, "triton"), inputs, name), inputs) <= BOUND


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - {"peak_window_attention"}))
def test_a_single_key_has_scores(name: str, kernels: str):
    inputs = make_inputs(Shape(n_slots=LENGTHS[0], window=1))
    assert error(name, score(name, inputs, kernels), inputs) <= BOUND


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mean_window_attention", "peak_window_attention"])
def test_the_comparison_catches_a_window_off_by_one(name: str, kernels: str):
    inputs = make_inputs(SHAPES[1])
    is_recent = inputs.columns > inputs.query_columns.amin(-1)[:, None, None]  # one key fewer
    shifted = replace(inputs, query_columns=inputs.query_columns - 1, is_recent=is_recent)
    assert error(name, of_live_keys(score(name, shifted, kernels), inputs, name), inputs) > 100.0


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_comparison_catches_swapped_heads_and_slots_off_by_one(name: str, kernels: str):
    inputs = make_inputs(SHAPES[1])
    for keys in (inputs.keys.flip(1), inputs.keys.roll(1, dims=2)):
        scores = score(name, replace(inputs, keys=keys), kernels)
        assert error(name, of_live_keys(scores, inputs, name), inputs) > 100.0


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_the_comparison_catches_the_earliest_duplicate_being_spared(kernels: str):
    # Three copies of one key: looked at from the other end, others of them are spared.
    name = "redundancy"
    inputs = make_inputs(SHAPES[1])
    inputs.keys[:, :, [12, 20, 28]] = inputs.keys[:, :, 12:13].clone()
    assert error(name, score(name, inputs, kernels), inputs) <= BOUND
    backwards = replace(inputs, keys=inputs.keys.flip(2), is_live=inputs.is_live.flip(2))
    assert error(name, score(name, backwards, kernels).flip(2), inputs) > 100.0


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_rows_that_are_not_due_score_zero_and_change_no_other_row(name: str, kernels: str):
    shape = Shape(n_slots=33, batch=3, kv_heads=1)
    inputs = make_inputs(shape)
    inputs.keys[1] = torch.nan
    is_due = torch.tensor([True, False, True], device=DEVICE)
    scores = score(name, inputs, kernels, is_due)
    assert (scores[1] == 0).all()
    due = is_due.nonzero().flatten()
    assert torch.equal(scores[due], score(name, inputs.rows(due), kernels))
    none = score(name, inputs, kernels, torch.zeros_like(is_due))
    assert (none == 0).all()
    everyone = make_inputs(shape)
    all_due = score(name, everyone, kernels, torch.ones_like(is_due))
    assert torch.equal(all_due, score(name, everyone, kernels))


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - {"key_norm"}))
def test_the_content_of_padding_does_not_change_scores(name: str, kernels: str):
    inputs = make_inputs(SHAPES[1])
    junk = torch.where(inputs.is_live[..., None], inputs.keys, 1e3)
    scores = score(name, replace(inputs, keys=junk), kernels)
    assert torch.equal(scores[inputs.is_live], score(name, inputs, kernels)[inputs.is_live])


@pytest.mark.parametrize("name", ARGUMENTS)
def test_strided_and_misaligned_inputs_score_as_contiguous_ones_do(name: str):
    inputs = make_inputs(SHAPES[1], torch.float16)
    batch, kv_heads, n_slots, dim = inputs.keys.shape
    # Keys as a model returns them, between other numbers; queries as they stand in a ring of the cache.
    wide = torch.full((batch, n_slots, kv_heads, dim + 3), torch.nan, dtype=torch.float16, device=DEVICE)
    wide[..., 1 : dim + 1] = inputs.keys.transpose(1, 2)
    ring = inputs.queries.permute(0, 3, 1, 2, 4).contiguous()
    strided = replace(
        inputs, keys=wide[..., 1 : dim + 1].transpose(1, 2), queries=ring.permute(0, 2, 3, 1, 4)
    )
    assert torch.equal(score(name, strided, "triton"), score(name, inputs, "triton"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_two_calls_agree_in_every_bit(name: str):
    inputs = make_inputs(SHAPES[2])
    assert torch.equal(score(name, inputs, "triton"), score(name, inputs, "triton"))


@pytest.mark.parametrize("name", OF_WINDOW)
def test_the_order_of_the_queries_in_their_ring_does_not_matter(name: str):
    inputs = make_inputs(SHAPES[1])
    turned = replace(
        inputs, queries=inputs.queries.roll(1, dims=3), query_columns=inputs.query_columns.roll(1, dims=1)
    )
    assert error(name, of_live_keys(score(name, turned, "triton"), inputs, name), inputs) <= BOUND


def test_scores_are_float32_also_when_the_keys_are_not():
    inputs = make_inputs(SHAPES[0], torch.float16)
    for kernels in IMPLEMENTATIONS:
        assert {score(name, inputs, kernels).dtype for name in ARGUMENTS} == {torch.float32}
