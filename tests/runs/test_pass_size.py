"""Sizes chosen from memory: `auto` for the tokens in a pass and the rows of an evaluation."""

import resource

import psutil
import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.files import DamagedFileError
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import checkpointed_layers
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.models.pass_bytes import PassBytes
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.planning import cards
from lit_rlkv.run_files import PASS_SIZE
from lit_rlkv.runs import pass_size
from lit_rlkv.runs.pass_size import (
    FOR_PASSES,
    MAX_ROWS,
    PassNeeds,
    available_memory,
    check_rollout_memory,
    choose_checkpoints,
    evaluation_rows,
    free_memory,
    machine_memory,
    tokens_per_pass,
)
from lit_rlkv.runs.run import Run, load_pass_limit
from tests.hand_built import make_model, make_roles
from tests.whole_runs import config

SPARSE = CacheSpec(policy="random", budget=7, interval=2, sink=1, window=2)
GIB = 2**30


def make_context(tmp_path, *overrides: str, **options) -> Run:
    return Run(config(tmp_path, *overrides), **options)


@pytest.fixture
def has_memory(monkeypatch):
    """Return a function that gives the machine so many bytes."""
    return lambda n_bytes: monkeypatch.setattr(pass_size, "machine_memory", lambda: n_bytes)


def test_auto_fills_its_share_of_the_memory_beside_weights_gradients_and_moments(tmp_path, has_memory):
    context, roles = make_context(tmp_path, "rollout.max_new_tokens=40"), make_roles()
    backbone = roles.backbone("policy")
    n_columns = max(context.sizes.prompts) + 40
    count = PassBytes(backbone)
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in roles.parameters()]
    weights = sum(size for size, _ in sizes) + 3 * sum(size for size, is_learned in sizes if is_learned)

    def found(n_rows: int, share: float = 1.01, n_graphs: int = 1) -> int:
        parts = count.of_pass(n_rows, n_columns, False)
        n_bytes = (n_graphs - 1) * parts["kept"] + sum(parts.values())
        has_memory(weights + int(share * n_bytes / FOR_PASSES))
        return tokens_per_pass(context, roles, PassNeeds(context, backbone, n_graphs), False)

    has_memory(weights + 1000)
    assert free_memory(context, roles) == 1000
    assert found(5) == 5 * n_columns
    assert found(5, 0.99) == 4 * n_columns
    assert found(11) == 11 * n_columns
    assert found(11, n_graphs=2) == 11 * n_columns
    assert found(1, 0.1) == n_columns  # a row there must be
    assert found(100_000) == TOKENS_PER_PASS
    has_memory(0)
    assert free_memory(context, roles) == 0


class OnCuda:
    """A backbone that says that it is on CUDA, where a choice has one more way."""

    def __init__(self, backbone):
        self.__dict__["own"] = backbone

    device = torch.device("cuda")

    def __getattr__(self, name):
        return getattr(self.own, name)


def test_checkpoints_are_as_few_as_fit(tmp_path, has_memory, caplog, monkeypatch):
    caplog.set_level("INFO")
    context, roles = make_context(tmp_path, "rollout.max_new_tokens=40"), make_roles()
    backbone = roles.backbone("policy")
    n_columns = max(context.sizes.prompts) + 40
    count = PassBytes(backbone)

    def choose(room, backbone=backbone):
        monkeypatch.setattr(pass_size, "_room", lambda run, module: room)
        return choose_checkpoints(context, roles, PassNeeds(context, backbone))

    of_pass = sum(count.of_pass(TOKENS_PER_PASS // n_columns, n_columns, False).values())
    assert [choose(room) for room in (of_pass, of_pass - 1, 0)] == [False, True, True]
    assert "auto: true" in caplog.text
    assert "with all activations" in caplog.text
    context.cfg.fabric.__dict__["tokens_per_pass"] = 2 * n_columns  # what is given needs less
    assert choose(sum(count.of_pass(2, n_columns, False).values())) is False
    monkeypatch.setattr(pass_size, "PassBytes", lambda model: count)
    row = sum(count.of_pass(1, n_columns, True).values())
    on_cuda = OnCuda(backbone)
    monkeypatch.setattr(pass_size, "checkpointed_layers", lambda model: checkpointed_layers(backbone))
    assert [choose(room, on_cuda) for room in (row, row - 1, 0)] == [True, "host", "host"]
    monkeypatch.setattr(pass_size, "checkpointed_layers", lambda model: [])
    assert choose(0) is False


def test_after_a_pass_that_ran_out_of_memory_a_run_keeps_no_more_than_before(tmp_path, monkeypatch):
    out_of_memory(make_context(tmp_path, folder=tmp_path), TOKENS_PER_PASS)
    context, roles = make_context(tmp_path, folder=tmp_path), make_roles()
    needs, n_columns = PassNeeds(context, roles.backbone("policy")), pass_size._longest(context)

    def choose(n_tokens):
        room = needs.of_pass(n_tokens // n_columns, n_columns, False)
        monkeypatch.setattr(pass_size, "_room", lambda run, module: room)
        return choose_checkpoints(context, roles, needs)

    sizes = (TOKENS_PER_PASS // 2, TOKENS_PER_PASS)
    assert context.pass_limit == sizes[0]
    assert [choose(n_tokens) for n_tokens in sizes] == [True, True]
    context.pass_limit = TOKENS_PER_PASS  # none has failed
    assert [choose(n_tokens) for n_tokens in sizes] == [True, False]


@pytest.mark.parametrize("given", [True, False, "host"])
def test_given_checkpoints_are_taken_as_they_are(tmp_path, has_memory, given):
    has_memory(0)
    context, roles = make_context(tmp_path, f"roles.gradient_checkpointing={given}".lower()), make_roles()
    needs = PassNeeds(context, roles.backbone("policy"))
    assert choose_checkpoints(context, roles, needs) == given


def out_of_memory(run, n_tokens):
    error = MemoryExhaustedError()
    error.tokens_per_pass = n_tokens
    with pytest.raises(MemoryExhaustedError), run.smaller_passes_after_failure():
        raise error


def test_a_run_that_ran_out_of_memory_resumes_with_half_of_the_pass(tmp_path, has_memory):
    has_memory(GIB)
    roles = make_roles()
    assert load_pass_limit(tmp_path) == TOKENS_PER_PASS
    for n_tokens, limit in ((100, 50), (50, 25), (1, 1)):
        out_of_memory(make_context(tmp_path, folder=tmp_path), n_tokens)
        context = make_context(tmp_path, folder=tmp_path)
        assert tokens_per_pass(context, roles, PassNeeds(context, roles.backbone("policy")), False) == limit
    (tmp_path / PASS_SIZE).write_text("[]")
    with pytest.raises(DamagedFileError, match=PASS_SIZE):
        make_context(tmp_path, folder=tmp_path)


@pytest.mark.parametrize(("given", "limit"), [("auto", 50), (64, TOKENS_PER_PASS)])
def test_the_folder_of_a_run_has_half_of_the_pass_that_did_not_fit(tmp_path, given, limit):
    run = make_context(tmp_path, f"fabric.tokens_per_pass={given}", folder=tmp_path / "run")
    run.folder.mkdir()
    out_of_memory(run, 100)
    assert load_pass_limit(run.folder) == limit


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
    assert tokens_per_pass(context, roles, PassNeeds(context, roles.backbone("policy")), False) == 123
    assert evaluation_rows(context, roles, roles.backbone("policy"), [SPARSE]) == 1000


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    total = psutil.virtual_memory().total
    limit, other = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    monkeypatch.setattr(cards, "CGROUP_LIMITS", (str(limit), str(other)))
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


def test_the_rank_with_the_least_memory_decides(tmp_path, has_memory, monkeypatch):
    class Other(Ranks):
        """Two ranks, of which the other one found less."""

        size = 2

        def all_gather_object(self, values):
            return [*values, *(value - 1 if value > 0 else -7 for value in values)]

    context, roles = make_context(tmp_path, "evaluation.batch_size=auto"), make_roles()
    has_memory(GIB)
    monkeypatch.setattr("lit_rlkv.runs.run.ranks_of", lambda fabric: Other())
    assert tokens_per_pass(context, roles, PassNeeds(context, roles.backbone("policy")), False) == 7
    assert evaluation_rows(context, roles, roles.backbone("policy"), [SPARSE]) == 7
    monkeypatch.setattr(Other, "all_gather_object", lambda self, values: [*values, 1])
    needs = PassNeeds(context, roles.backbone("policy"))
    assert choose_checkpoints(context, roles, needs) is True  # here all would fit


@pytest.mark.parametrize(
    ("options", "n_slots", "n_rows", "n_new"),
    [
        ([], 9, 16, 8),
        (["rollout.max_rows=4"], 9, 4, 8),
        (["rollout.n_shards=2"], 9, 8, 8),
        (["experiment=dense", "rollout.max_new_tokens=900"], None, 16, 256),  # it grows with the responses
    ],
)
def test_a_rollout_whose_cache_and_records_exceed_the_memory_is_refused(
    tmp_path, monkeypatch, options, n_slots, n_rows, n_new
):
    options = ["rollout.n_prompts=8", "algorithm.group_size=2", *options]
    context, backbone = make_context(tmp_path, *options), make_model()
    n_columns = min(context.sizes.prompts) + n_new
    n_responses = 8 if "rollout.n_shards=2" in options else 16
    # keys and values in float32 of 2 layers, 2 KV heads, 8 dims; 2 bytes for each key of each head
    cache = 2 * (n_slots or n_columns) * 2 * n_rows * 2 * 8 * 4
    needed = cache + 2 * (n_rows + n_responses) * 2 * n_columns * 2
    monkeypatch.setattr(pass_size, "available_memory", lambda device: needed)
    check_rollout_memory(context, backbone)
    monkeypatch.setattr(pass_size, "available_memory", lambda device: needed - 1)
    with pytest.raises(
        MemoryExhaustedError, match=r"iB for the KV cache \(change cache\.dtype.*of memory h"
    ) as e:
        check_rollout_memory(context, backbone)
    assert "\n" not in str(e.value)
    check_rollout_memory(make_context(tmp_path, *options, "stages=[sft]"), backbone)


@pytest.mark.parametrize(("n_new", "is_told"), [(8, False), (900, True)])
def test_a_record_of_codes_that_does_not_pay_is_told_once(tmp_path, caplog, n_new, is_told):
    options = ["cache.dtype=int8", f"rollout.max_new_tokens={n_new}"]
    check_rollout_memory(make_context(tmp_path, *options), make_model())
    assert ("the record of its codes takes" in caplog.text) == is_told
    caplog.clear()
    check_rollout_memory(make_context(tmp_path, *options, "stages=[sft]"), make_model())
    assert caplog.text == ""


def test_a_limit_of_the_address_space_counts_as_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + GIB, before[1]))
    try:
        assert GIB / 2 < available_memory(torch.device("cpu")) <= GIB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
