"""Each benchmark at toy size: it prints, and records rows with the entries that pages and tables read."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from functools import partial

import fit_process
import kernels
import learner
import learns
import peers
import pytest
import ranks
import record
import torch
from kernel_parts import learner as kernel_learner
from kernel_parts import run as kernel_run
from kernel_parts.accuracy import LIMIT, WrongKernelError
from kernel_parts.case import Arm, Case, Setting
from kernel_parts.timing import Ceilings
from replay_parts import evictions
from rollout_parts import ours, theirs
from rollout_parts.setting import Setting as RolloutSetting
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rlkv.models import replay_logps
from lit_rlkv.runs.preflight import checked_config
from tests.gguf_files import write_gguf
from tests.whole_runs import composed

KERNELS = "kernels --device cpu --size toy --rounds 1 --ops"
GAP = "replay_gap --device cpu --preset tiny --batch 2 --new 24 --seeds 1 --budget 16 --dtypes float32 --part"
MEMORY = "hydra_memory --preset tiny --batch 2 --prompt 8 --response 24 --rank 4 --rounds 1 --variants"
OF_CASE = {"op", "label", "sizes", "arms", "excess_error", "ceilings", "timed"}
OF_GAP = {"model", "dtype", "policy", "budget", "n_tokens", "gap", "no_eviction", "dense_learner"}
LEARNER = "learner --device cpu --layers 1 --lengths 24 --interval 4 --prompt 6 --rounds 1"
COMMANDS = {
    f"{KERNELS} decode_attention --only 33": ("kernels", OF_CASE),
    f"{KERNELS} evict --only 1_of_2": ("kernels", OF_CASE),
    f"{KERNELS} slot_scores --only '(knorm), 1'": ("kernels", OF_CASE),
    f"{KERNELS} shadow_attention --only 96_tokens,_budget_16": ("kernels", OF_CASE),
    f"{KERNELS} shared_prompt --only 3_responses": ("kernels", OF_CASE),
    f"{KERNELS} token_logps --only 24": ("kernels", OF_CASE),
    f"{KERNELS} token_sampling --only 6": ("kernels", OF_CASE),
    f"{LEARNER} --budgets 8 12 --levers none frozen+host": (
        "learner",
        {"asked", "sizes", "arms", "excess_error", "out_of_memory"},
    ),
    f"{LEARNER} --budgets 8 --profile": ("profile", {"view", "operations"}),
    "lengths --tokens 300 --attention 300 --rounds 1": (
        "lengths",
        {"tokens", "rollout_us", "learner_us", "gap"},
    ),
    "learns --toy --folder FOLDER": (
        "learns",
        {"arm", "task", "rewards", "tokens_per_s", "rollout_s", "update_s", "peak_mib"},
    ),
    "rollout --device cpu --preset tiny --batch 2 --new 24 --rounds 1 --budgets 16": (
        "rollout",
        {"preset", "cache", "batch", "new", "integrated", "median_s", "tokens_per_s"},
    ),
    f"{GAP} evictions": ("replay_gap", OF_GAP),
    f"{GAP} evictions --model MODEL": ("replay_gap", OF_GAP),
    f"{GAP} logits": ("rounded_logits", {"on", "n_rows", "n_tokens", "gaps"}),
    f"{GAP} choices": ("recorded_choices", {"cache", "top_k", "family", "figures"}),
    f"{GAP} codes --model MODEL": ("quantized_cache", {"cell", "n_response_tokens", "gap"}),
    "peers --rounds 1 --only 'all keys'": (
        "peers",
        {"cache", "trl_version", "n_trained", "n_rounds", "seconds", "times_as_fast", "times_as_fast_range"},
    ),
    "peers --rounds 1 --lengths 6 --layers 1": ("peers_long", {"n_tokens", "n_layers", "trainers"}),
    "cpu_speed --model FOLDER --rounds 1": (
        "cpu_speed",
        {"model", "what", "ours_tokens_per_second", "theirs_tokens_per_second", "ratio", "seconds"},
    ),
    f"{MEMORY} j_hydra": (
        "hydra_memory",
        {"setting", "limit_bytes", "variant", "held", "predicted", "seconds", "largest_batch"},
    ),
    "one_gpu --toy --bits 16 --methods dense shadow --folder FOLDER": (
        "one_gpu",
        {"shape", "method", "tokens_per_s", "learner_s", "kv_mib", "n_iterations"},
    ),
    "ranks --rounds 1 --iterations 2": ("ranks", {"n_ranks", "rollout_tokens_per_s", "tokens_per_s"}),
}
SMALL = {
    "peers": {
        "N_LAYERS": 1,
        "N_WARM": 0,
        "SIZES": {"n_prompts": 2, "group_size": 2, "max_new_tokens": 6},
        "LONG_SIZES": {"n_prompts": 2, "group_size": 2},
        "AT_LENGTH": {name: peers.AT_LENGTH[name] for name in (peers.TRL, "TRL, evicting")},
    },
}
"""Names of scripts that have no options for a toy size."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command line with its rows in a folder of the test, and return the rows of a name."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")

    def run(command: str, name: str) -> list[dict]:
        script, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments, "--record"])
        importlib.import_module(script).main()
        return record.rows(name)

    return run


def write_llama(folder) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=32, num_key_value_heads=2, eos_token_id=None, **sizes)
    ).save_pretrained(folder)


def finished_run(folder, *settings, **options):
    """Stand in for processes of fit, of which each iteration takes a second a phase."""
    folder.mkdir(parents=True)
    columns = {f"time/{phase}": 1.0 for phase in (*ranks.PHASES, "rollout")} | {
        "num_tokens": 8,
        "reward": 0.5,
    }
    columns |= {"perf/tokens_per_second/rollout": 9.0, "memory/update/peak": 2**20}
    rows = [",".join(columns), *[",".join(map(str, columns.values()))] * 2]
    (folder / "metrics.csv").write_text("\n".join(rows))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_and_records_rows_with_their_keys(command, run, tmp_path, monkeypatch, capsys):
    name, keys = COMMANDS[command]
    script = command.split()[0]
    if script == "peers":
        pytest.importorskip("trl")
    for attribute, value in SMALL.get(script, {}).items():
        monkeypatch.setattr(importlib.import_module(script), attribute, value)
    if "MODEL" in command:
        monkeypatch.setattr(evictions.tempfile, "gettempdir", lambda: str(tmp_path))
        write_gguf(tmp_path / "small.gguf")
    if script == "ranks":
        monkeypatch.setattr(ranks, "fit", finished_run)
        checked_config(composed(*ranks.SETTINGS))
    if script == "learns":
        monkeypatch.setattr(fit_process, "fit", finished_run)
        for arm in learns.ARMS.values():
            checked_config(composed(*learns.COMMON, *learns.TOY, *arm))
    if script == "cpu_speed":
        module = importlib.import_module(script)
        write_llama(tmp_path / "model")
        monkeypatch.setattr(module, "N_SHORT", 8)
        monkeypatch.setattr(module, "DECODES", {"short": [(2, 8, module.DENSE), (2, 8, module.EVICTING)]})
    rows = run(
        command.replace("MODEL", str(tmp_path / "small.gguf")).replace("FOLDER", str(tmp_path / "model")),
        name,
    )
    assert keys <= rows[-1].keys()
    for row in rows:
        assert {"date", "commit", "source", "device", "torch"} <= row.keys()
    assert capsys.readouterr().out


def test_a_restart_measures_what_is_missing(run, capsys):
    command = "rollout --device cpu --preset tiny --batch 2 --new 24 --rounds 1 --skip-theirs --budgets 16"
    rows = run(f"{command} --minutes 9", "rollout")
    assert [row["integrated"] for row in rows] == [True, False]  # an estimate, then whole rollouts
    assert rows[1]["kv_of_dense"] == pytest.approx(24 / 40)  # 16 + 8 slots where all keys take 16 + 24
    assert len(run(f"{command} 32 --minutes 0", "rollout")) == 2
    assert "32: no time left" in capsys.readouterr().out
    assert len(run(f"{command} --again", "rollout")) == 4


def test_a_wrong_kernel_is_refused_and_the_other_cases_are_measured(run, monkeypatch):
    def wrong() -> float:
        raise WrongKernelError("off by 5")

    def cases(setting: Setting):
        for label, check in (("first", wrong), ("second", lambda: 1.0)):
            arms = (Arm("ours", lambda: torch.ones(3)),)
            yield label, partial(Case, op="evict", label=label, sizes={}, arms=arms, check=check)

    monkeypatch.setattr(kernel_run, "ceilings", lambda device: Ceilings(1.0, 1.0))
    monkeypatch.setitem(kernel_run.CASES, "evict", cases)
    for n_rows in (2, 3):  # started again, it measures what was refused once more
        with pytest.raises(SystemExit, match="evict, first: refused: off by 5"):
            run(f"{KERNELS} evict", "kernels")
        rows = record.rows("kernels")
        assert len(rows) == n_rows
    assert [row["label"] for row in rows] == ["first", "second", "first"]
    assert (rows[0]["reason"], rows[0]["out_of_memory"]) == ("off by 5", False)


def test_a_case_that_memory_does_not_hold_is_a_row_and_a_lost_device_ends_the_run(run, monkeypatch):
    def full() -> Case:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel_run, "ceilings", lambda device: Ceilings(1.0, 1.0))
    monkeypatch.setitem(kernel_run.CASES, "evict", lambda setting: iter([("large", full)]))
    assert [row["out_of_memory"] for row in run(f"{KERNELS} evict", "kernels")] == [True]
    monkeypatch.setattr(sys.modules["kernel_parts.case"], "is_device_lost", lambda: True)
    with pytest.raises(torch.OutOfMemoryError):
        run(f"{KERNELS} evict --again", "kernels")


def test_sizes_are_toys_where_kernels_are_interpreted():
    assert kernels.parse_arguments(["--device", "cpu"]).size == "toy"
    assert kernels.parse_arguments(["--device", "cuda"]).size == "real"


def test_kernels_that_replay_other_evictions_are_refused():
    setting = Setting("cpu", is_toy=True, n_rounds=1)
    shape = kernel_learner.Shape(learner.PRESETS["tiny"], 2, interval=4, prompt=6)
    model = kernel_learner.make_model(setting, shape, 30)

    def always_dense(model, logps, rollout, kernels):
        return kernel_learner.step(model, partial(replay_logps, shadow=False), rollout, "reference")

    def in_place(model, logps, rollout, kernels):
        return kernel_learner.step(model, logps, rollout, "reference")

    assert kernel_learner.check(setting, model, shape, 24, 8, in_place) <= LIMIT
    with pytest.raises(WrongKernelError, match="shadow view, 24 tokens"):
        kernel_learner.check(setting, model, shape, 24, 8, always_dense)
    rollout = kernel_learner.make_rollout(setting, shape, 30, budget=8)
    dense = kernel_learner.dense_logps(model, rollout)
    torch.testing.assert_close(kernel_learner.torch_logps(model, rollout), dense, atol=1e-5, rtol=1e-5)


def gradient_errors() -> str:
    """Return as JSON how far the gradients under each choice of levers are from those of `frozen` alone."""
    setting = Setting("cpu", is_toy=True, n_rounds=1)
    shape = kernel_learner.Shape(learner.PRESETS["tiny"] | {"num_hidden_layers": 1}, 1, 16, prompt=40)
    rollout = kernel_learner.make_rollout(setting, shape, 1100, budget=48)
    found = {}
    for levers in (("frozen",), ("frozen", "compiled"), ("frozen", "host")):
        one = kernel_learner.Learner(setting, shape, 1100, levers)
        for number, parameter in enumerate(one.trained):
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(number))
        found["+".join(levers)] = torch.cat(
            [value.flatten() for value in one.step(kernel_learner.shadow_logps, rollout, "auto")]
        )
    plain = found.pop("frozen")
    return json.dumps({levers: float((f - plain).norm() / plain.norm()) for levers, f in found.items()})


def test_levers_change_no_gradient():
    # In another process, because torch.compile cannot trace the type checks of the test run.
    paths = os.pathsep.join(map(str, (record.ROOT, record.ROOT / "benchmarks")))
    code = f"from {__name__} import gradient_errors; print(gradient_errors())"
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert 0 < errors["frozen+compiled"] < 1e-5  # other code ran
    assert errors["frozen+host"] < 1e-5


TOY = RolloutSetting("tiny", "h2o", batch=4, new=24, rounds=1, device=torch.device("cpu"))


def test_a_batch_that_does_not_fit_generate_is_halved(monkeypatch):
    fits = theirs.filled_cache

    def small_memory(setting, model, batch, n_cached):
        if batch > 1:
            raise torch.OutOfMemoryError("no room")
        return fits(setting, model, batch, n_cached)

    monkeypatch.setattr(theirs, "filled_cache", small_memory)
    row = theirs.time_theirs(TOY)
    assert (row["batch"], row["asked_batch"]) == (1, 4)


def test_evictions_that_the_sampler_did_not_see_are_not_timed(monkeypatch):
    plain = RolloutSetting.roll_out

    def wrong(setting, *args, **options):
        found = plain(setting, *args, **options)
        return found.with_record(evicted_at=found.evicted_at.roll(1, dims=2))

    ours.check(TOY, 16)
    monkeypatch.setattr(RolloutSetting, "roll_out", wrong)
    with pytest.raises(RuntimeError, match="replay other log-probs"):
        ours.check(TOY, 16)


def test_the_pages_show_the_last_rows_beside_trl():
    docs, last = record.ROOT / "docs", {row["n_tokens"]: row for row in record.rows(peers.LONG)}
    long = peers.long_table([last[length] for length in sorted(last)])
    assert long in (docs / "results" / "kernels.md").read_text(encoding="utf-8")
    inside = peers.inside_table(record.rows(peers.INSIDE_TRL)[-1]).splitlines()[2:]
    page = (docs / "how-to" / "inside-trl.md").read_text(encoding="utf-8")
    assert all(line in page for line in inside)


def test_a_python_without_trl_is_refused_in_one_line(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'trl'\" >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(SystemExit, match="No module named 'trl'; see --trl-python"):
        peers.TrainerProcess(str(fake), tmp_path, 1, None, peers.SIZES, "trl")
