"""Decode steps with compiled layers: the same tokens, log-probs up to rounding, and exact replay."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lit_rlkv.models.compiled_layers import CompiledLayers, check_compiler
from lit_rlkv.types import Rollout
from tests.models_zoo import MOE_FAMILIES, tiny_model
from tests.rollouts import gap, roll_out
from tests.tiers import slow

ROOT = Path(__file__).parents[2]


def sample(family: str, device: str, *, compile_layers: bool) -> Rollout:
    options = {"compile_layers": compile_layers, "record_routing": family in MOE_FAMILIES}
    return roll_out(tiny_model(family).to(device), max_new_tokens=20, **options)


@torch.no_grad()
def compared(family: str, device: str) -> str:
    """Sample with eager layers, with compiled ones, and again; return a comparison as JSON."""
    graphs, rollouts = [], []
    for compile_layers in (False, True, True):
        rollouts.append(sample(family, device, compile_layers=compile_layers))
        graphs.append(counters["stats"]["unique_graphs"])
    eager, compiled, again = rollouts
    shifted = compiled.with_record(evicted_at=compiled.evicted_at.roll(1, dims=1))
    if compiled.record.expert_ids is not None:
        shifted = compiled.with_record(expert_ids=compiled.record.expert_ids.roll(1, dims=-1))

    facts = {
        "graphs": graphs,
        "same_tokens": [torch.equal(eager.input_ids, other.input_ids) for other in (compiled, again)],
        "same_evictions": torch.equal(eager.evicted_at, compiled.evicted_at),
        "difference": (compiled.rollout_logps - eager.rollout_logps).abs().max().item(),
        "replay_gap": gap(family, compiled),
        "gap_of_shifted": gap(family, shifted),
    }
    return json.dumps(facts)


@pytest.mark.parametrize(
    ("family", "device"),
    [
        *(slow(family, "cpu") for family in ("llama", "mixtral", "deepseek_v2")),
        pytest.param("llama", "cuda", marks=pytest.mark.gpu),  # within a captured step
    ],
)
def test_compiled_layers_sample_the_same_tokens_and_are_replayed(family: str, device: str):
    # In another process, because torch.compile cannot trace the type checks of the test run.
    code = f"from {__name__} import compared; print(compared({family!r}, {device!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    # The eager rollout compiled nothing, and the third nothing more: its weights and cache are known.
    eager, compiled, again = facts["graphs"]
    assert eager == 0 < compiled == again
    assert facts["same_tokens"] == [True, True]
    assert facts["same_evictions"]
    # Not 0: other code ran, which rounds otherwise.
    assert 0 < facts["difference"] < 1e-5
    assert facts["replay_gap"] < 1e-4 < 1e-2 < facts["gap_of_shifted"]


def test_layers_run_compiled_within_the_block_only():
    model = tiny_model()
    layers = CompiledLayers(model)
    first = model.base_model.layers[0]
    for _ in range(2):
        with layers:
            assert "forward" in vars(first)
        assert "forward" not in vars(first)
    with pytest.raises(RuntimeError, match="inside"), layers:
        raise RuntimeError("inside")
    assert "forward" not in vars(first)


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no decoder layers that"):
        CompiledLayers(nn.Linear(2, 2))


def test_a_machine_without_a_compiler_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def fails() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fails)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler"):
        check_compiler(torch.device("cpu"))
    check_compiler(torch.device("cuda"))
