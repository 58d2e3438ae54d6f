"""Layers that lie in shards on two processes: the same numbers as on one, with half the weights each."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lit_rlkv.config import ConfigError
from lit_rlkv.distributed.fsdp import is_sharded
from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR, over_ranks
from lit_rlkv.distributed.sharding import (
    ShardedLayers,
    average_whole_gradients,
    clip_gradients,
    disable_foreach_for_mixed_tensors,
    gather_full,
    gather_full_state,
    shard_like,
    shard_state_like,
)
from lit_rlkv.models import activations
from lit_rlkv.runs.run import Run
from tests.distributed.rank_runs import SETTINGS, SYNC, rows_of, weights_of
from tests.integrations.test_layer_kinds import build
from tests.saved_models import save_model
from tests.whole_runs import as_rank, config, free_port, run, run_on_ranks

SHARDED = ["fabric.strategy=fsdp2", "fabric.accelerator=cpu"]
CHOSEN = ["algorithm=kl_cov", "algorithm.advantage.choose.share=0.1"]
"""A loss of tokens that are chosen among those of all ranks."""


def assert_same(folder, one, two):
    for ours, theirs in zip(rows_of(folder / one), rows_of(folder / two), strict=True):
        # The gap is rounding alone, which depends on the rows of a pass.
        assert max(row.pop("kv/replay_gap", 0.0) for row in (ours, theirs)) < 1e-5
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    weights = weights_of(folder / two)
    for parameter, value in weights_of(folder / one).items():
        torch.testing.assert_close(value, weights[parameter], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smd", ["experiment=smd", "roles.gradient_checkpointing=true", "fabric.tokens_per_pass=48"]),
        (
            "full",
            [
                *("algorithm=ppo", "roles=ppo", "algorithm.critic_warmup=2"),
                # An evaluation comes first, which leaves layers whole.
                *("fabric.unshard_rollout=true", "stages=[sft,rl,eval]"),
            ],
        ),
        ("joint", ["experiment=j_hydra_ppo"]),
        ("two_backbones", ["algorithm=ppo", "roles=dynamic_lora"]),
        ("pairs", ["algorithm=online_dpo"]),
        ("sharded_sync", [*SYNC, "fabric.unshard_rollout=true"]),
        ("sharded_masks", ["rollout.top_k=20", "rollout.top_p=0.9", "fabric.tokens_per_pass=48"]),
    ],
)
def test_two_sharded_ranks_equal_one_process(folder, name, options):
    ours = [option for option in options if not option.startswith("fabric.")]
    small = ["evaluation.n_prompts=8", "evaluation.n_mismatch=8"]
    run(folder, name, *SETTINGS, *small, *ours, "rollout.n_shards=2")
    run_on_ranks(folder, f"{name}-two", 2, *SETTINGS, *small, *SHARDED, *options)
    assert max(row["grad_norm"] for row in rows_of(folder / name)) > 1e-3
    assert_same(folder, name, f"{name}-two")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("full", ["roles=full"]), ("adapters", [])])
def test_sharded_layers_that_are_recomputed_in_tiles_equal_those_of_one_process(
    folder, monkeypatch, name, options
):
    monkeypatch.setattr(activations, "TILE", 7)  # also of the ranks, which are forks
    options = [*SETTINGS, *options, "stages=[sft,rl]"]
    run(folder, name, *options, "rollout.n_shards=2", "roles.gradient_checkpointing=false")
    run_on_ranks(folder, f"{name}-two", 2, *options, *SHARDED, "roles.gradient_checkpointing=true")
    assert_same(folder, name, f"{name}-two")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_sharded_layers_with_states_and_windows_equal_those_of_one_process(tmp_path, name):
    model = f"model.path={save_model(tmp_path / 'model', build(name))}"
    options = [*SETTINGS, "stages=[rl]", "experiment=smd", "reward=numeric", "roles.rank=4", model]
    run(tmp_path, "one", *options, "rollout.n_shards=2")
    run_on_ranks(tmp_path, "two", 2, *options, *SHARDED)
    assert_same(tmp_path, "one", "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("ppo", ["algorithm=ppo"]), ("sync", SYNC), ("int4", [*CHOSEN, "cache.dtype=int4"])]
)
def test_a_sharded_run_resumes_on_one_process_and_the_reverse(folder, name, options):
    options = [*SETTINGS, *options, "algorithm.n_minibatches=2", "algorithm.lr_schedule=constant"]
    options += ["rollout.n_shards=2"]
    begin = [*options, "algorithm.n_iterations=2"]
    whole, to_two, to_one = (f"{name}-{how}" for how in ("whole", "to-two", "to-one"))
    run(folder, whole, *options)
    run(folder, to_two, *begin)
    run_on_ranks(folder, to_one, 2, *begin, *SHARDED)
    run_on_ranks(folder, to_two, 2, *options, *SHARDED, resumes=True)
    run(folder, to_one, *options, resumes=True)
    assert_same(folder, whole, to_two)
    assert_same(folder, whole, to_one)


@pytest.mark.slow
def test_sharded_sft_and_evaluation_equal_those_of_one_process(tmp_path):
    options = [*SETTINGS, "stages=[sft,eval]", "reward=verifier", "sft.n_steps=10", "sft.n_pairs=0"]
    # Three batches, of which the second rank has one.
    options += ["evaluation.n_prompts=20", "evaluation.batch_size=8"]
    run(tmp_path / "one", "run", *options)
    run_on_ranks(tmp_path / "two", "run", 2, *options, *SHARDED)
    one, two = (
        load_file(next((tmp_path / name / "sft_models").iterdir()) / "model.safetensors")
        for name in ("one", "two")
    )
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-6, atol=1e-8)
    found = [json.loads((tmp_path / name / "run" / "evaluation.json").read_text()) for name in ("one", "two")]
    assert found[0]["after"][0]["accuracy"] == found[1]["after"][0]["accuracy"]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("fabric.precision=16-mixed", "use bf16-mixed"),
        ("diagnostics=default", r"add diagnostics\.gradient=null"),
        ("fabric.unshard_rollout=3", "must be true or false, got 3"),
    ],
)
def test_settings_that_sharding_does_not_support_are_refused(tmp_path, option, says):
    with pytest.raises(ConfigError, match=says):
        config(tmp_path, *SHARDED, "diagnostics=none", option)


def test_sharded_layers_refuse_a_cuda_graph_before_a_model_is_loaded(tmp_path):
    cfg = config(tmp_path, *SHARDED, "diagnostics=none", "rollout.cuda_graph=true")
    with pytest.raises(ConfigError, match="cannot capture a decode step that gathers"):
        Run(cfg)


def test_sharded_layers_refuse_to_be_compiled_before_a_model_is_loaded(tmp_path):
    cfg = config(tmp_path, *SHARDED, "diagnostics=none", "rollout.compile_layers=true")
    with pytest.raises(ConfigError, match="cannot compile sharded layers"):
        Run(cfg)


def test_unshard_rollout_without_sharding_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="shards nothing"):
        config(tmp_path, "fabric.unshard_rollout=true")


class Stack(nn.Module):
    """Two layers on a part that is not sharded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))

    def forward(self, x, use_cache=False):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Counted(ShardedLayers):
    """Notes what this rank gives to others without a forward of its own."""

    given = ""

    def _pass(self):
        self.given += "p"
        super()._pass()

    def _keep(self):
        self.given += "k"
        super()._keep()


def sharded(stack, *, keeps_whole=False):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return Counted(stack, stack, [*stack.layers], mesh, torch.device("cpu"), keeps_whole=keeps_whole)


def on_two_ranks(check, *args):
    """Run a check in two processes, which fail together."""
    torch.multiprocessing.start_processes(_checked, (2, free_port(), check, args), 2, start_method="fork")


def _checked(rank, n_ranks, port, check, args):
    as_rank(rank, n_ranks, port)
    dist.init_process_group("gloo")
    check(rank, *args)
    FORWARD_COORDINATOR.wait()
    dist.destroy_process_group()


def check_parts(rank):
    stack, alone = Stack(), Stack()
    sharded(stack)
    parts = {name: p for name, p in stack.named_parameters() if isinstance(p, DTensor)}
    assert set(parts) == {f"layers.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")}
    for name, parameter in alone.named_parameters():
        if name in parts:
            assert parts[name].to_local().numel() == parameter.numel() / 2
            found = gather_full(parts[name].detach())
            assert torch.equal(found, parameter) if rank == 0 else found.numel() == 0
            assert torch.equal(shard_like(parameter.detach(), parts[name]).to_local(), parts[name].to_local())


def test_a_rank_holds_its_part_of_each_layer_and_all_of_the_rest():
    on_two_ranks(check_parts)


def check_forwards(rank, keeps_whole):
    """The first rank computes five times where the second does twice, and both on two backbones."""
    stacks = [Stack(), Stack()]
    layers = [sharded(stack, keeps_whole=keeps_whole) for stack in stacks]
    x = torch.arange(4, dtype=torch.float64)
    with torch.no_grad():
        for number, use_cache in (
            ((0, True), (1, False), (0, True), (0, True), (1, True), (0, False)),
            ((1, True), (0, False)),
        )[rank]:
            assert torch.equal(stacks[number](x, use_cache=use_cache), Stack()(x))
    assert float(over_ranks(torch.ones(()))) == 2.0
    # What one rank computes alone, the other gives its parts for.
    given = "".join(one.given for one in layers)
    assert ("k" in given) <= keeps_whole
    assert len(given) >= (0, 2)[rank]
    assert all(isinstance(p, DTensor) for stack in stacks for p in stack.layers.parameters())


@pytest.mark.parametrize("keeps_whole", [False, True])
def test_ranks_may_compute_more_often_than_each_other_and_in_another_order(keeps_whole):
    on_two_ranks(check_forwards, keeps_whole)


def check_kept(rank):
    counts = []
    for keeps_whole in (False, True):
        stack = Stack()
        sharded(stack, keeps_whole=keeps_whole)
        with torch.no_grad(), torch.profiler.profile() as profile:
            for _ in range(4):
                stack(torch.ones(4, dtype=torch.float64), use_cache=True)
        counts.append(sum(event.count for event in profile.key_averages() if "all_gather" in event.key))
        assert all(isinstance(p, DTensor) for p in stack.layers.parameters()) != keeps_whole
        assert is_sharded(stack)
        FORWARD_COORDINATOR.wait()
        assert all(isinstance(p, DTensor) for p in stack.layers.parameters())
    assert counts[0] == 4 * counts[1] > 0


def test_layers_that_stay_whole_are_gathered_once_until_the_next_exchange():
    on_two_ranks(check_kept)


def check_gradients(rank, max_norm):
    stack, alone = Stack(), Stack()
    sharded(stack)
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        stack(x)  # as a rollout comes before an update, on one rank more often than on the other
        if rank == 0:
            stack(x)
    for _ in range(2):
        loss = stack(x[rank]).square().sum() + stack(2 * x[rank]).sum()
        FORWARD_COORDINATOR.wait()
        loss.backward()
    (alone(x).square().sum() + alone(2 * x).sum()).backward()  # 2 backwards, the mean of 2 ranks
    average_whole_gradients(stack)
    norm = clip_gradients(stack, max_norm)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(stack.parameters(), alone.parameters(), strict=True):
        found = ours.grad.full_tensor() if isinstance(ours, DTensor) else ours.grad
        torch.testing.assert_close(found, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("max_norm", [0.5, 1e9, float("inf")])
def test_gradients_and_their_norm_are_those_of_one_process(max_norm):
    on_two_ranks(check_gradients, max_norm)


def check_flags(rank):
    stack = Stack()
    sharded(stack)
    configured = torch.optim.AdamW(stack.parameters())
    disable_foreach_for_mixed_tensors(configured)
    assert configured.param_groups[0]["foreach"] is False
    alone = torch.optim.AdamW(Stack().parameters())
    configured.load_state_dict(shard_state_like(alone.state_dict(), configured))
    assert configured.param_groups[0]["foreach"] is False
    alone.load_state_dict(shard_state_like(gather_full_state(configured.state_dict()), alone))
    assert alone.param_groups[0]["foreach"] is None


def test_an_optimizer_state_does_not_carry_the_foreach_flag():
    on_two_ranks(check_flags)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_shards_train_in_half_precision(folder, sft_model, precision):
    options = [*SETTINGS, f"fabric.precision={precision}", "algorithm.n_iterations=1", "stages=[rl]"]
    options += [f"model.path={sft_model}", *SHARDED, "fabric.unshard_rollout=true"]
    run_on_ranks(folder, f"sharded-{precision}", 2, *options)
    (row,) = rows_of(folder / f"sharded-{precision}")
    assert row["skipped_steps"] == 0
    assert row["grad_norm"] > 0
    assert row["kv/replay_gap"] < 0.2
