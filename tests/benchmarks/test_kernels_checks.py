"""Each operation's gate lets its kernel pass, in the interpreter, and refuses ones that are wrong."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernel_parts import decode as kernel_decode
from kernel_parts import evict as kernel_evict
from kernel_parts import sampling as kernel_sampling
from kernel_parts import scores as kernel_scores
from kernel_parts import shadow as kernel_shadow
from kernel_parts import tokens as kernel_tokens
from kernel_parts.accuracy import LIMIT, WrongKernelError
from kernel_parts.case import Setting
from kernel_parts.pool import TOY, Pool, make_pool
from torch import Tensor

from lit_rlkv.kernels.decode_attention import decode_attention
from lit_rlkv.kernels.evict import evict

HAS_CUDA = torch.cuda.is_available()
SETTING = Setting("cuda" if HAS_CUDA else "cpu", is_toy=True, n_rounds=1)


def decode_inputs() -> tuple:
    query = SETTING.random(2, 2, 4, 16, seed=0)
    keys, values = (SETTING.random(2, 2, 40, 16, seed=seed) for seed in (1, 2))
    return query, keys, values, torch.full((2,), 40, device=SETTING.device), 0.25


def test_decode_attention_passes():
    assert kernel_decode.check("toy", *decode_inputs()) <= LIMIT


def swapped(call: Callable[..., Tensor], query: Tensor, keys: Tensor, *rest: Tensor, **options) -> Tensor:
    return call(query, keys.flip(1), *rest, **options)


def one_slot_less(call: Callable[..., Tensor], *pool: Tensor, **options) -> Tensor:
    query, keys, values, n_live, scaling = pool
    return call(query, keys, values, n_live - 1, scaling, **options)


def scores_of_the_newest_kept(call: Callable[..., Tensor], *pool: Tensor, **options) -> Tensor:
    """The newest key's score does not start from 0."""
    n_live, received = pool[3], options["received"]
    newest = received[:, :, int(n_live[0]) - 1].clone()
    out = call(*pool, **options)
    received[:, :, int(n_live[0]) - 1] += newest
    return out


@pytest.mark.parametrize("wrong", [swapped, one_slot_less, scores_of_the_newest_kept])
def test_wrong_decode_attention_is_refused(wrong: Callable[..., Tensor]):
    attend = partial(wrong, partial(decode_attention, kernels="reference"))
    with pytest.raises(WrongKernelError):
        kernel_decode.check("toy", *decode_inputs(), attend=attend)


@pytest.mark.parametrize("moves_attention", [True, False])
def test_eviction_passes(moves_attention: bool):
    assert kernel_evict.check(SETTING, "toy", moves_attention, TOY.batch) == 0


def late(*arguments, **options) -> None:
    """Evictions recorded one column too late."""
    *pool, now, first = arguments
    evict(*pool, now + 1, first, **options | {"kernels": "reference"})


def least(scores, *rest, **options) -> None:
    evict(-scores, *rest, **options | {"kernels": "reference"})


@pytest.mark.parametrize("wrong", [late, least])
def test_wrong_eviction_is_refused(wrong: Callable[..., None]):
    with pytest.raises(WrongKernelError):
        kernel_evict.check(SETTING, "toy", False, 1, wrong)


@pytest.mark.parametrize("name", kernel_scores.POLICY_OF)
def test_scores_pass_and_shifted_ones_are_refused(name: str):
    pool = make_pool(SETTING, n_due=1)
    assert kernel_scores.check("toy", name, pool) <= LIMIT

    def shifted(name: str, pool: Pool, kernels: str) -> Tensor:
        return kernel_scores.score(name, pool, "reference").roll(1, -1)

    with pytest.raises(WrongKernelError):
        kernel_scores.check("toy", name, pool, shifted)


def test_a_compaction_moves_what_is_counted():
    # All rows due: of each pool the keys behind the first victim move.
    compaction = kernel_evict.make_compaction(SETTING, False, TOY.batch)
    work = kernel_evict.counted(compaction)
    before = compaction.columns.clone()
    compaction.run("reference")
    n_moved = int((compaction.columns != before)[:, :, : TOY.budget].sum())
    n_pools = TOY.batch * TOY.n_kv_heads
    itemsize = compaction.keys.element_size()
    small = n_pools * TOY.n_slots * 12 + n_moved * 8 + n_pools * TOY.interval * 4
    assert work.n_bytes == small + 4 * n_moved * TOY.dim * itemsize
    compaction.restore()
    assert torch.equal(compaction.columns, before)


def shadow_inputs() -> kernel_shadow.Inputs:
    return kernel_shadow.make_inputs(SETTING, 70, 16)


def test_shadow_attention_passes():
    assert kernel_shadow.check("toy", shadow_inputs()) <= LIMIT


def evictions_one_late(inputs: kernel_shadow.Inputs) -> Tensor:
    evicted_at = torch.where(inputs.evicted_at < 2**30, inputs.evicted_at + 1, inputs.evicted_at)
    moved = kernel_shadow.Inputs(*inputs.trained, inputs.d_out, evicted_at)
    return kernel_shadow.shadow(moved, kernels="reference", make_plan=lambda: None)


def values_without_gradient(inputs: kernel_shadow.Inputs) -> Tensor:
    out = kernel_shadow.shadow(inputs, kernels="reference", make_plan=lambda: None)
    return out + 0.01 * (inputs.value.sum() - inputs.value.sum().detach())


@pytest.mark.parametrize("wrong", [evictions_one_late, values_without_gradient])
def test_wrong_shadow_attention_is_refused(wrong: kernel_shadow.Attend):
    with pytest.raises(WrongKernelError):
        kernel_shadow.check("toy", shadow_inputs(), wrong)


def test_truth_by_chunks_is_the_definition(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_shadow, "CHUNK", 32)
    inputs = shadow_inputs()
    in_float64 = kernel_shadow.Inputs(
        *(tensor.detach().double().requires_grad_() for tensor in inputs.trained),
        inputs.d_out.double(),
        inputs.evicted_at,
    )
    by_definition = partial(kernel_shadow.shadow, kernels="reference", make_plan=lambda: None)
    whole = kernel_shadow.both_passes(in_float64, by_definition)
    parts = kernel_shadow.by_chunks(inputs, 1, torch.float64)
    for of_all, of_head, first in zip(whole, parts, (2, 2, 1, 1), strict=True):
        torch.testing.assert_close(of_all[:, first:], of_head)


@pytest.mark.parametrize("what", kernel_tokens.N_PRODUCTS)
def test_token_logps_pass_and_wrong_ones_are_refused(what: str):
    inputs = kernel_tokens.make_inputs(SETTING, 12, 16, 60, is_frozen="frozen" in what)
    assert kernel_tokens.check("toy", what, inputs) <= LIMIT
    plain = partial(kernel_tokens.values_of(what), kernels="reference")

    def doubled_gradient(inputs: kernel_tokens.Inputs) -> Tensor:
        values = plain(inputs)
        return 2 * values - values.detach()

    with pytest.raises(WrongKernelError, match="gradient of the h"):  # hidden states or head
        kernel_tokens.check("toy", what, inputs, doubled_gradient)


@pytest.mark.parametrize("what", kernel_tokens.N_PRODUCTS)
def test_baselines_of_token_logps_compute_the_same(what: str):
    inputs = kernel_tokens.make_inputs(SETTING, 12, 16, 60, is_frozen="frozen" in what).to(torch.float32)
    expected = kernel_tokens.both_passes(inputs, partial(kernel_tokens.values_of(what), kernels="reference"))
    for way in kernel_tokens.whole_ways(what).values():
        for actual, value in zip(kernel_tokens.both_passes(inputs, way), expected, strict=True):
            torch.testing.assert_close(actual, value, atol=1e-4, rtol=1e-4)


def test_token_sampling_passes_and_a_wrong_temperature_is_refused():
    logits = SETTING.random(6, 60, seed=0)
    generator = torch.Generator(SETTING.device).manual_seed(0)
    assert kernel_sampling.check("toy", logits, generator) <= LIMIT

    def cooler(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        return kernel_sampling.draw(1.1 * logits, generator, "reference")

    with pytest.raises(WrongKernelError):
        kernel_sampling.check("toy", logits, generator, cooler)
