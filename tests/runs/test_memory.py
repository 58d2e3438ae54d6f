"""The memory of a run: `auto` for passes and rows of an evaluation, and what is said before any work."""

import io
import re
import resource
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from lightning.fabric import Fabric
from rich.console import Console

from lit_rlkv.config import ConfigError
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.files import DamagedFileError
from lit_rlkv.fit import main
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.planning import cards, passes
from lit_rlkv.planning.cards import CONTEXT, FRAGMENTS, available_memory, find_card, machine_memory
from lit_rlkv.planning.models import pass_bytes_of, roles_of
from lit_rlkv.planning.passes import MARGIN
from lit_rlkv.planning.plan import Planner
from lit_rlkv.run_files import PASS_SIZE
from lit_rlkv.runs import memory
from lit_rlkv.runs.memory import (
    MAX_ROWS,
    check_memory,
    choose_checkpoints,
    evaluation_rows,
    passes_of,
    tokens_per_pass,
)
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.run import Run, load_pass_limit
from tests.forks import ended
from tests.hand_built import make_model, make_roles
from tests.saved_models import save_checkpoint
from tests.whole_runs import TINY, config

SPARSE = CacheSpec(policy="random", budget=7, interval=2, sink=1, window=2)
GIB = 2**30


def make_context(tmp_path, *overrides: str, **options) -> Run:
    return Run(config(tmp_path, *overrides), **options)


@pytest.fixture
def has_memory(monkeypatch):
    """Return a function that gives the machine so many bytes beside Python, torch and fragments."""

    def set_memory(usable):
        n_bytes = CONTEXT + int(usable / (1 - FRAGMENTS)) + 1
        monkeypatch.setattr(cards, "machine_memory", lambda: n_bytes)

    return set_memory


def test_auto_fills_the_memory_beside_weights_gradients_and_moments(tmp_path, has_memory):
    context, roles = make_context(tmp_path, "rollout.max_new_tokens=40"), make_roles()
    found = passes_of(context, roles)
    n_columns = max(context.sizes.prompts) + 40
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in roles.parameters()]
    weights = sum(size for size, _ in sizes) + 3 * sum(size for size, is_learned in sizes if is_learned)

    def fitting(n_rows: int, share: float = 1.01, n_graphs: int = 1) -> int:
        parts = found.pass_bytes.of_pass(n_rows, n_columns, False)
        # 4 bytes of a time in each of 2 layers and 2 KV heads
        n_bytes = (n_graphs - 1) * parts["kept"] + sum(parts.values()) + 16 * n_rows * n_columns
        has_memory(weights + int(share * (1 + MARGIN) * n_bytes))
        cfg = replace(context.cfg, distillation=None) if n_graphs == 1 else context.cfg
        given = replace(found, cfg=cfg, card=memory._card(context))
        return tokens_per_pass(context, given, False)

    assert fitting(5) == 5 * n_columns
    assert fitting(5, 0.99) == 4 * n_columns
    assert fitting(11) == 11 * n_columns
    assert fitting(11, n_graphs=2) == 11 * n_columns
    assert fitting(1, 0.1) == n_columns  # a row there must be
    assert fitting(100_000) == TOKENS_PER_PASS


@pytest.mark.parametrize(
    ("layout", "separate_passes", "n_graphs"),
    [("hydra", True, 2), ("hydra", False, 3), ("j_hydra", False, 2), ("ppo", False, 3)],
)
def test_forwards_that_wait_together_are_counted(tmp_path, layout, separate_passes, n_graphs):
    options = ["algorithm=ppo", f"roles.layout={layout}", f"algorithm.loss.separate_passes={separate_passes}"]
    found = passes_of(make_context(tmp_path, *options), make_roles())
    assert found.n_graphs == n_graphs  # with that of distillation
    row = found.needs(1, 20, False)["kept"]
    assert row == n_graphs * found.pass_bytes.of_pass(1, 20, False)["kept"]
    alone = passes_of(make_context(tmp_path, "algorithm=ppo"), make_model())  # SFT distils nothing
    assert alone.n_graphs == 1


def in_room(found, room):
    """Return the passes with so many bytes beside the models."""
    card = replace(
        found.card, memory=CONTEXT + int((sum(found.model_bytes.values()) + room) / (1 - FRAGMENTS)) + 1
    )
    return replace(found, card=card)


def test_checkpoints_are_as_few_as_fit(tmp_path, monkeypatch):
    context, roles = make_context(tmp_path, "rollout.max_new_tokens=40"), make_roles()
    found = passes_of(context, roles)

    def choose(n_bytes, found=found):
        room = int((1 + MARGIN) * n_bytes)
        return choose_checkpoints(context, in_room(found, room))

    def size(n_rows, checkpoints):
        return sum(found.needs(n_rows, found.n_columns, checkpoints).values())

    of_pass = size(TOKENS_PER_PASS // found.n_columns, False)
    assert [choose(n_bytes) for n_bytes in (of_pass + 9, of_pass - 9, 0)] == [False, True, True]
    fabric = replace(found.cfg.fabric, tokens_per_pass=2 * found.n_columns)  # what is given needs less
    assert choose(size(2, False) + 9, replace(found, cfg=replace(found.cfg, fabric=fabric))) is False
    on_cuda = replace(found, card=replace(found.card, is_gpu=True))
    row = size(1, True)
    assert [choose(n_bytes, on_cuda) for n_bytes in (row + 9, row - 9, 0)] == [True, "host", "host"]
    monkeypatch.setattr(passes, "checkpointed_layers", lambda model: [])
    assert choose(0) is False


def test_after_a_pass_that_ran_out_of_memory_a_run_keeps_no_more_than_before(tmp_path):
    out_of_memory(make_context(tmp_path, folder=tmp_path), TOKENS_PER_PASS)
    context, roles = make_context(tmp_path, folder=tmp_path), make_roles()
    found, half = passes_of(context, roles), TOKENS_PER_PASS // 2
    assert found.limit == half
    plenty = in_room(found, 2**40)
    assert choose_checkpoints(context, plenty) is True
    assert tokens_per_pass(context, plenty, True) == half
    fresh = replace(plenty, limit=TOKENS_PER_PASS)  # none has failed
    assert choose_checkpoints(context, fresh) is False


def test_a_run_chooses_what_its_plan_has_chosen(tmp_path, has_memory):
    start = save_checkpoint(tmp_path / "model")
    context = make_context(tmp_path, f"model.path={start}", "rollout.max_new_tokens=40", "stages=[rl]")
    module = make_policy(context, start)
    roles, card = roles_of(context.cfg), find_card(None)
    plan = Planner(
        context.cfg, roles, pass_bytes_of(context.cfg, roles, card), card, max(context.sizes.prompts)
    )
    chosen = set()
    for usable in (2**18, 2**22, 2**24, 2**26, 2**30):
        has_memory(usable)
        planned = replace(plan, card=find_card(None))
        in_run = passes_of(context, module.roles)
        assert in_run.n_columns == planned.n_columns
        assert in_run.room == planned.room
        choice = choose_checkpoints(context, in_run)
        assert choice == planned.checkpoints
        n_tokens = tokens_per_pass(context, in_run, choice)
        assert n_tokens == planned.n_tokens(choice)
        chosen.add((choice, n_tokens))
    assert len(chosen) > 2


@pytest.mark.parametrize("given", [True, False, "host"])
def test_given_checkpoints_are_taken_as_they_are(tmp_path, has_memory, given):
    has_memory(0)
    options = [f"roles.gradient_checkpointing={given}".lower(), "fabric.tokens_per_pass=7"]
    context = make_context(tmp_path, *options)
    found = passes_of(context, make_roles())
    assert choose_checkpoints(context, found) == given
    assert found.pass_bytes is None  # nothing is counted


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
        assert tokens_per_pass(context, passes_of(context, roles), False) == limit
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
    context = make_context(tmp_path)
    has_memory(GIB)
    alone = memory._card(context).memory
    monkeypatch.setattr(Fabric, "world_size", property(lambda self: 4))
    assert memory._card(context).memory == alone // 4
    monkeypatch.setattr(context.fabric.strategy, "num_nodes", 2, raising=False)
    assert memory._card(context).memory == alone // 2


@pytest.mark.parametrize("n_bytes", [0, GIB, 2**50])
def test_given_numbers_are_taken_as_they_are(tmp_path, has_memory, n_bytes):
    has_memory(n_bytes)
    context = make_context(tmp_path, "fabric.tokens_per_pass=123", "evaluation.batch_size=1000")
    roles = make_roles()
    assert tokens_per_pass(context, passes_of(context, roles), False) == 123
    assert evaluation_rows(context, roles, [SPARSE]) == 1000


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

    def found(*caches: CacheSpec) -> int:
        return evaluation_rows(context, roles, list(caches))

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
    found = passes_of(context, roles)
    assert tokens_per_pass(context, found, False) == 7
    assert evaluation_rows(context, roles, [SPARSE]) == 7
    monkeypatch.setattr(Other, "all_gather_object", lambda self, values: [*values, 1])
    assert choose_checkpoints(context, found) is True  # here all would fit


@pytest.mark.parametrize(
    ("options", "n_slots", "n_rows", "n_new"),
    [
        ([], 9, 16, 8),
        (["rollout.max_rows=4"], 9, 4, 8),
        (["rollout.n_shards=2"], 9, 8, 8),
        (["experiment=dense", "rollout.max_new_tokens=900"], None, 16, 256),  # it grows with the responses
        (
            ["cache.budget=800", "rollout.max_new_tokens=900"],
            None,
            16,
            256,
        ),  # a CPU takes it as it is written
    ],
)
def test_a_rollout_whose_cache_and_records_exceed_the_memory_is_refused(
    tmp_path, monkeypatch, options, n_slots, n_rows, n_new
):
    options = [
        "rollout.n_prompts=8",
        "algorithm.group_size=2",
        "optimizer._target_=torch.optim.SGD",
        *options,
    ]
    options += ["~optimizer.betas", "model.preset.hidden_size=8", "roles.rank=1"]
    context = make_context(tmp_path, *options, "stages=[rl]")
    n_columns = min(context.sizes.prompts) + n_new
    n_responses = 8 if "rollout.n_shards=2" in options else 16
    roles = roles_of(context.cfg)
    # keys and values in float32 of 2 layers, 4 KV heads, 8 dims; 2 bytes for each key of each head
    needed = 2 * (n_slots or n_columns) * 2 * n_rows * 4 * 8 * 4
    needed += 2 * (n_rows + n_responses) * 4 * n_columns * 2
    needed += sum(weight.nbytes for weight in roles.parameters())
    monkeypatch.setattr(memory, "available_memory", lambda n=1: needed)
    check_memory(context, None)
    monkeypatch.setattr(memory, "available_memory", lambda n=1: needed - 1)
    with pytest.raises(
        ConfigError, match=r"iB for the KV cache \(change cache\.dtype.*of memory here; "
    ) as e:
        check_memory(context, None)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("stages", ["[sft,rl]", "[rl]"])
def test_training_whose_weights_gradients_and_moments_exceed_the_memory_is_refused(
    tmp_path, monkeypatch, stages
):
    context = make_context(tmp_path, "roles=full", f"stages={stages}")
    policy = roles_of(context.cfg).backbone("policy")
    n_sft = 4 * sum(weight.nbytes for weight in policy.parameters())
    monkeypatch.setattr(memory, "available_memory", lambda n=1: n_sft - 1)
    what = "the SFT stage" if "sft" in stages else "the update"
    with pytest.raises(ConfigError, match=rf"{what} needs at least .* for the optimizer, more than the"):
        check_memory(context, None)
    if "sft" in stages:  # a model that exists needs no SFT
        model = tmp_path / "model"
        policy.config.save_pretrained(model)
        with pytest.raises(ConfigError, match="the update needs at least"):
            check_memory(context, model)


def test_fit_refuses_before_sft_what_a_small_machine_cannot_hold(tmp_path):
    def shrink():
        cards.machine_memory = lambda: 2**17
        psutil.swap_memory = lambda: SimpleNamespace(free=0)

    code, said = ended(main, *TINY, f"runs_dir={tmp_path}", before=shrink)
    assert code == 1
    assert "error: the SFT stage needs at least" in said
    assert "128 KiB of memory here" in said
    assert not [*tmp_path.rglob("*")]  # no model, and no run to resume


def test_a_run_says_what_it_will_need_and_warns_of_full_length(tmp_path, has_memory, caplog):
    console = Console(file=io.StringIO(), width=500)
    context = make_context(tmp_path, "stages=[rl]", console=console)
    check_memory(context, None)
    said = console.file.getvalue()
    assert re.fullmatch(
        r"memory rollout \S+ .iB \(most: .*\), update \S+ .iB \(most: kept\); usable .*\n", said
    )
    assert context.predicted in said
    assert "may not fit" not in caplog.text
    has_memory(2**10)
    check_memory(context, None)
    assert "responses of all 8 tokens may not fit" in caplog.text


def test_an_error_of_memory_has_the_prediction_beside_the_peak(tmp_path):
    run = make_context(tmp_path, folder=tmp_path)
    run.predicted = "rollout 3 GiB"
    with pytest.raises(MemoryExhaustedError) as caught, run.smaller_passes_after_failure():
        raise MemoryExhaustedError("too much")
    assert re.fullmatch(
        r"too much\nThe peak was [\d.]+ [MG]iB; predicted of RL: rollout 3 GiB", str(caught.value)
    )


def test_a_model_that_cannot_be_planned_is_left_to_its_loading(tmp_path, caplog):
    caplog.set_level("INFO")
    context = make_context(tmp_path, "stages=[rl]", "rollout.replay_routing=true")
    check_memory(context, None)
    assert "memory is not planned: TinyQwen3" in caplog.text or "has no experts to record" in caplog.text


@pytest.mark.parametrize(("n_new", "is_told"), [(8, False), (900, True)])
def test_a_record_of_codes_that_does_not_pay_is_told_once(tmp_path, caplog, n_new, is_told):
    options = ["cache.dtype=int8", f"rollout.max_new_tokens={n_new}"]
    check_memory(make_context(tmp_path, *options), None)
    assert ("the record of its codes takes" in caplog.text) == is_told
    caplog.clear()
    check_memory(make_context(tmp_path, *options, "stages=[sft]"), None)
    assert caplog.text == ""


def test_swap_counts_beside_the_memory_of_a_small_machine(monkeypatch):
    total = psutil.virtual_memory().total
    monkeypatch.setattr(cards, "machine_memory", lambda: total // 8)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=3 * total))
    assert available_memory() > 3 * total
    assert available_memory(2) == available_memory() // 2
    monkeypatch.setattr(psutil, "LINUX", False)  # where swap grows, what is used now says little
    monkeypatch.setattr(cards, "machine_memory", lambda: total)
    assert available_memory() == 4 * total


def test_a_model_whose_own_code_needs_weights_is_left_to_its_loading(tmp_path, monkeypatch, caplog):
    def fail(cfg):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    caplog.set_level("INFO")
    monkeypatch.setattr(memory, "roles_of", fail)
    check_memory(make_context(tmp_path), None)
    assert "memory is not planned: Tensor.item()" in caplog.text


def test_a_limit_of_the_address_space_counts_as_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + GIB, before[1]))
    try:
        assert GIB / 2 < available_memory() <= GIB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
