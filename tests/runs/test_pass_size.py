"""Sizes chosen from memory: `auto` for the tokens in a pass and the rows of an evaluation."""

import psutil
import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.adapters import lora_layers, use_adapter
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.runs import pass_size
from lit_rlkv.runs.context import RunContext, build_context
from lit_rlkv.runs.pass_size import (
    MAX_ROWS,
    bytes_of_pass,
    evaluation_rows,
    free_memory,
    machine_memory,
    saved_bytes,
    tokens_per_pass,
)
from tests.hand_built import make_model, make_roles
from tests.models_zoo import build, tiny_config
from tests.whole_runs import config

SPARSE = CacheSpec(policy="random", budget=7, interval=2, sink=1, window=2)
GIB = 2**30


def make_context(tmp_path, *overrides: str) -> RunContext:
    return build_context(config(tmp_path, *overrides))


@pytest.fixture
def has_memory(monkeypatch):
    """Return a function that gives the machine so many bytes."""
    return lambda n_bytes: monkeypatch.setattr(pass_size, "machine_memory", lambda: n_bytes)


def predicted(*args, **options) -> int:
    """The bytes that a row alone is expected to keep."""
    return sum(bytes_of_pass(*args, **options))


def error(found: float, expected: float) -> float:
    return abs(found / expected - 1)


@pytest.mark.parametrize("n_columns", [17, 100, 333, 700])
@pytest.mark.parametrize("adapter", [None, "policy"])
def test_the_bytes_of_a_row_are_those_that_a_forward_saves(adapter, n_columns):
    if adapter is None:
        backbone = make_model()
        expected = saved_bytes(backbone, n_columns)
        found = predicted(backbone, n_columns, checkpoints_layers=False)
        linear = saved_bytes(backbone, 32) / 32 * n_columns
    else:
        backbone = make_roles().backbone("policy")
        with use_adapter(lora_layers(backbone), adapter):
            expected = saved_bytes(backbone, n_columns)
            found = predicted(backbone, n_columns, checkpoints_layers=False)
            linear = saved_bytes(backbone, 32) / 32 * n_columns
    assert error(found, expected) < 0.05
    # the control: without the square, whose share grows with the length
    assert n_columns < 300 or error(linear, expected) > 0.2


def test_what_adapters_and_trained_weights_save_differs():
    roles = make_roles()
    backbone = roles.backbone("policy")

    def found(adapter: str | None) -> int:
        with use_adapter(lora_layers(backbone), adapter):
            return predicted(backbone, 100, checkpoints_layers=False)

    assert found("policy") > found(None)
    assert error(found("policy"), predicted(make_model(), 100, checkpoints_layers=False)) > 0.05


def test_checkpointing_needs_less():
    backbone = make_model(num_hidden_layers=4)
    plain, checkpointed = (predicted(backbone, 200, checkpoints_layers=on) for on in (False, True))
    # of four layers one, and the inputs of all: 4 · 200 · 32 · 4 bytes
    assert checkpointed == pytest.approx(plain / 4 + 4 * 200 * 32 * 4, abs=2)
    assert checkpointed < 0.5 * plain


def test_auto_fills_half_of_the_memory_beside_weights_gradients_and_moments(tmp_path, has_memory):
    context, roles = make_context(tmp_path, "rollout.max_new_tokens=40"), make_roles()
    backbone = roles.backbone("policy")
    n_columns = max(context.sizes.prompts) + 40
    with use_adapter(lora_layers(backbone), "policy"):
        needed = predicted(backbone, n_columns, checkpoints_layers=False)
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in roles.parameters()]
    weights = sum(size for size, _ in sizes) + 3 * sum(size for size, is_learned in sizes if is_learned)

    def found(n_rows: float) -> int:
        has_memory(weights + int(2 * n_rows * needed))
        return tokens_per_pass(context, roles, backbone, "policy")

    has_memory(weights + 1000)
    assert free_memory(context, roles) == 1000
    assert found(5.5) == 5 * n_columns
    assert found(11.5) == 11 * n_columns
    assert found(0.1) == n_columns  # a row there must be
    assert found(1e6) == TOKENS_PER_PASS
    has_memory(0)
    assert free_memory(context, roles) == 0


def test_auto_makes_larger_passes_with_checkpointing_and_smaller_ones_of_trained_weights(
    tmp_path, has_memory
):
    roles = make_roles()
    has_memory(16 * 2**20)

    def found(of=roles, adapter: str | None = "policy", *overrides: str) -> int:
        context = make_context(tmp_path, "rollout.max_new_tokens=200", *overrides)
        return tokens_per_pass(context, of, of.backbone("policy"), adapter)

    plain = found()
    assert found(roles, "policy", "roles.gradient_checkpointing=true") > plain
    larger = make_roles("ppo")
    assert found(larger, None) != plain
    has_memory(8 * 2**20)
    assert found() < plain


def test_processes_share_the_memory_of_their_machine(tmp_path, has_memory, monkeypatch):
    context, roles = make_context(tmp_path), make_roles()
    has_memory(GIB)
    alone = free_memory(context, roles)
    monkeypatch.setattr(Fabric, "world_size", property(lambda self: 4))
    assert alone - free_memory(context, roles) == GIB - GIB // 4
    monkeypatch.setattr(context.fabric.strategy, "num_nodes", 2, raising=False)
    assert alone - free_memory(context, roles) == GIB - GIB // 2


@pytest.mark.parametrize("n_bytes", [0, GIB, 2**50])
def test_given_numbers_are_taken_as_they_are(tmp_path, has_memory, n_bytes):
    has_memory(n_bytes)
    context = make_context(tmp_path, "fabric.tokens_per_pass=123", "evaluation.batch_size=1000")
    roles = make_roles()
    assert tokens_per_pass(context, roles, roles.backbone("policy"), "policy") == 123
    assert evaluation_rows(context, roles, roles.backbone("policy"), [SPARSE]) == 1000


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    total = psutil.virtual_memory().total
    limit, other = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    monkeypatch.setattr(pass_size, "CGROUP_LIMITS", (str(limit), str(other)))
    assert machine_memory() == total  # no container
    limit.write_text("max\n")
    assert machine_memory() == total
    other.write_text(f"{2 * total}\n")
    assert machine_memory() == total
    other.write_text("5000\n")
    assert machine_memory() == 5000
    limit.write_text("4000\n")
    assert machine_memory() == 4000


def test_the_rows_of_an_evaluation_follow_the_size_of_the_cache(tmp_path, has_memory):
    context, roles = (
        make_context(tmp_path, "rollout.max_new_tokens=200", "evaluation.batch_size=auto"),
        make_roles(),
    )
    backbone = roles.backbone("policy")

    def found(*caches: CacheSpec) -> int:
        return evaluation_rows(context, roles, backbone, list(caches))

    has_memory(8 * 2**20)
    large = CacheSpec(policy="random", budget=70, interval=2, sink=1, window=2)
    assert 1 < found(CacheSpec.dense()) < found(large) < found(SPARSE) < MAX_ROWS
    assert found(SPARSE, CacheSpec.dense()) == found(CacheSpec.dense())  # one after the other, the same rows
    few = found(large)
    has_memory(4 * 2**20)
    assert 0 < found(large) < few
    has_memory(0)
    assert found(SPARSE) == 1
    has_memory(2**45)
    assert found(SPARSE) == MAX_ROWS


@pytest.mark.parametrize("n_columns", [100, 400])
def test_copies_of_weights_are_counted_once_and_not_for_every_token(n_columns):
    backbone = make_model()
    with torch.autocast("cpu", torch.bfloat16):
        found = predicted(backbone, n_columns, checkpoints_layers=False)
        fixed, _ = bytes_of_pass(backbone, n_columns, checkpoints_layers=False)
        assert fixed > 1000  # what autocast casts
        assert error(found, saved_bytes(backbone, n_columns)) < 0.05


def test_the_probe_is_no_longer_than_the_positions_of_the_model():
    backbone = prepare_backbone(build(tiny_config("gpt2", max_position_embeddings=48)))
    assert predicted(backbone, 40, checkpoints_layers=False) > 0


def test_the_rank_with_the_least_memory_decides(tmp_path, has_memory, monkeypatch):
    class Other(Ranks):
        """Two ranks, of which the other one found less."""

        size = 2

        def all_gather_object(self, values):
            return [*values, *(value - 1 if value > 0 else -7 for value in values)]

    context, roles = make_context(tmp_path, "evaluation.batch_size=auto"), make_roles()
    has_memory(GIB)
    monkeypatch.setattr(pass_size, "ranks_of", lambda fabric: Other())
    assert tokens_per_pass(context, roles, roles.backbone("policy"), "policy") == 7
    assert evaluation_rows(context, roles, roles.backbone("policy"), [SPARSE]) == 7


def test_two_graphs_at_a_time_halve_a_pass(tmp_path, has_memory):
    context, roles = make_context(tmp_path), make_roles()
    has_memory(64 * 2**20)
    one, two = (
        tokens_per_pass(context, roles, roles.backbone("policy"), "policy", n_graphs=n) for n in (1, 2)
    )
    assert error(two, one / 2) < 0.1
