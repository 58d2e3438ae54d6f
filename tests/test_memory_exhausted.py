"""Runs whose memory is too small, started as users start them."""

import re
import resource
from pathlib import Path

import pytest
import torch

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.fit import main
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.run import Run
from lit_rlkv.stages.rl import train_policy
from tests.forks import ended, in_a_fork
from tests.whole_runs import TINY, config, run

GIB = 2**30
SIZES = ["rollout.n_prompts=8", "algorithm.group_size=2", "cache.budget=5", "cache.interval=2"]


def large_window(n_queries):
    """A cache that remembers so many queries; of a budget, no more is allocated than whole sequences need."""
    sizes = [f"cache.window={n_queries}", f"cache.budget={2 * n_queries}", "evaluation.budgets=[]"]
    return ["cache.policy=snapkv", *sizes]


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory, share_sft_model):
    return share_sft_model(config(tmp_path_factory.mktemp("runs")))


@pytest.mark.slow
def test_a_rollout_beyond_all_memory_is_one_error_with_the_sizes(tmp_path, sft_runs):
    # Of 2 layers, 16 rows, 4 heads, 8 dims in float32: 2 · 16 · 4 · 2^29 · 8 · 4 = 2^41 bytes
    overrides = [f"model.path={sft_runs}", "stages=[rl]", *SIZES, *large_window(2**29)]
    code, said = ended(main, *TINY, *overrides, f"hydra.run.dir={tmp_path}/run")
    assert code == 1
    assert "error: out of memory in the rollout: 2 responses of up to 8 tokens to each of 8" in said
    assert "2.00 TiB  latest queries; change cache.window" in said
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in said
    assert "Traceback" not in said
    assert "Traceback" in (tmp_path / "run" / "fit.log").read_text()
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def run_within(n_bytes, tmp_path, name, *overrides):
    """A run in a fork that may have so many bytes more: its exit code and what it said."""

    def work():
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + n_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        run(tmp_path, name, *overrides)

    return in_a_fork(work)


def test_a_rollout_beyond_the_memory_limit_is_refused_and_a_smaller_window_fits(tmp_path, sft_runs):
    options = [f"model.path={sft_runs}", "stages=[rl]", "diagnostics=none", *SIZES]
    # 2 · 16 · 4 · 2^21 · 8 · 4 = 2^33 bytes in two tensors
    code, said = run_within(3 * GIB, tmp_path, "large", *options, *large_window(2**21))
    assert code == 1
    assert "MemoryExhaustedError: out of memory in the rollout" in said
    assert "8.00 GiB  latest queries" in said
    code, said = run_within(3 * GIB, tmp_path, "small", *options)
    assert code == 0, said


def test_an_update_out_of_memory_says_what_to_lower_and_calls_on_exception(tmp_path, sft_runs):
    heard = []

    class Large(RLCallback):
        def loss_terms(self, module, batch, outputs):
            torch.empty(2**50, dtype=torch.uint8)
            return {}, {}

        def on_exception(self, trainer, pl_module, exception):
            heard.append(exception)

    cfg = config(tmp_path, f"model.path={sft_runs}", "stages=[rl]", "algorithm.n_minibatches=2", *SIZES)
    parts = Run(cfg, folder=tmp_path)
    module = make_policy(parts, sft_runs)
    with pytest.raises(
        MemoryExhaustedError, match="out of memory in the update, 16 of 16 sequences of up to"
    ) as caught:
        train_policy(parts, module, [Large()])
    assert heard == [caught.value]
    n_tokens = caught.value.tokens_per_pass
    assert n_tokens == 16 * int(re.search(r"of up to (\d+) tokens", str(caught.value))[1])
    helps = f"set fabric.tokens_per_pass below {n_tokens}, set roles.gradient_checkpointing=true"
    assert helps in str(caught.value)
