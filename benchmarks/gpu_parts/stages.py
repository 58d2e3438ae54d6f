"""Stages of a GPU run: the commands of each, in processes of their own, which end in time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path.home() / ".cache" / "lit_rlkv"
"""Folder of compiled kernels."""
OWN_SHARE = 0.85
"""Share of a stage's time after which a command starts no new measurement."""
GRACE_S = 15.0
"""Seconds between the signal that ends a command as Ctrl-C does, and the one that it cannot refuse."""
N_LAST_LINES = 30
TITLES = {
    "A": "correctness",
    "B": "kernels",
    "C": "rollout and replay gap",
    "D": "learner",
    "E": "tuning",
}
GPU_TESTS = (
    "tests/kernels",
    "tests/models/test_lm_head.py",
    "tests/rollout/test_compiled_layers.py",
    "tests/rollout/test_decoder.py",
    "tests/rollout/test_graph.py",
    "tests/rollout/test_growing_cache.py",
)
TOY_TESTS = ("tests/kernels/test_triton_functions.py", "tests/kernels/test_device.py")


@dataclass(frozen=True)
class Ended:
    """How a stage ended."""

    outcome: str
    """`done`, `crashed`, or `out of time`."""
    seconds: float
    last_lines: list[str]


def commands(stage: str, minutes: float, *, is_toy: bool) -> list[list[str]]:
    """Return the commands of a stage, which share its minutes."""
    if stage == "A":
        return [test_command(is_toy=is_toy)]
    timed = TOY[stage] if is_toy else REAL[stage]
    if stage == "C" and not is_toy and MODEL.is_file() and find_spec("gguf"):
        timed = [*timed, f"replay_gap.py --model {MODEL} --budget 256 --new 512"]
    return [
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--minutes", f"{minutes * OWN_SHARE}"]
        for script, *arguments in map(str.split, timed)
    ]


REAL = {
    # What has targets first: FlexAttention's compiler takes a minute for a length of shadow attention.
    "B": [
        "kernels.py --record --ops decode_attention",
        "kernels.py --record --ops shadow_attention --only 16384",
        "kernels.py --record --ops token_logps token_sampling slot_scores evict shadow_attention",
    ],
    "C": [
        "rollout.py --record --rounds 1 --budgets 1024",
        "replay_gap.py --record",
        "rollout.py --record --rounds 1 --budgets 1024 --skip-theirs --compile-layers",
        "rollout.py --record --rounds 1 --budgets 512 2048 --skip-theirs",
    ],
    "D": ["learner.py --record --lengths 16384 8192 4096"],
    "E": ["kernels.py --record --tune"],
}
TOY_RUN = "--device cpu --record"
TOY = {
    "B": [f"kernels.py {TOY_RUN} --rounds 1 --ops decode_attention shadow_attention --only 3"],
    "C": [
        f"rollout.py {TOY_RUN} --rounds 1 --batch 2 --new 32 --budgets 16",
        f"replay_gap.py {TOY_RUN} --batch 2 --new 32 --budget 16",
    ],
    "D": [
        f"learner.py {TOY_RUN} --rounds 1 --layers 1 --lengths 24 --budgets 8 --interval 4 --prompt 6",
    ],
    "E": [f"kernels.py {TOY_RUN} --rounds 1 --tune --size toy --ops decode_attention"],
}
"""A CPU can run these; their figures mean nothing."""
LOST_DEVICE = 77
"""Exit status of tests that left the device unusable."""
OK_CODES = {"A": (0, 1, 5)}
"""Exit statuses of a command that did its work, where 0 is not the only one: pytest's for failed tests, which
the table shows, and for none left to run."""


def test_command(*, is_toy: bool) -> list[str]:
    """Return pytest on the GPU tests, without the options of pyproject.toml that need further packages."""
    options = [
        "-o",
        "addopts=--import-mode=importlib",
        "-o",
        "filterwarnings=",
        "-p",
        "gpu_parts.pytest_rows",
    ]
    tests = TOY_TESTS if is_toy else GPU_TESTS
    marker = "not slow and not gpu" if is_toy else "gpu"
    return [sys.executable, "-m", "pytest", "-q", "--tb=short", *options, "-m", marker, *tests]


def environment(folder: Path, *, is_toy: bool) -> dict[str, str]:
    """Return the environment of the commands.

    Rows go to the folder, memory grows in place, and what one command has compiled the next one finds.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    ours = {
        "BENCHMARK_RESULTS": str(folder.resolve()),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(CACHE / "triton")),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor")),
    }
    return os.environ | ours | ({"CUDA_VISIBLE_DEVICES": ""} if is_toy else {})


def run_stage(stage: str, folder: Path, minutes: float, *, is_toy: bool) -> Ended:
    """Run the commands of a stage one after the other until its minutes are over.

    A command that fails does not stop the next. Tests that lose the device are started again, without the one
    that lost it.
    """
    started_at = time.monotonic()
    outcomes, last_lines = [], []
    todo = deque(commands(stage, minutes, is_toy=is_toy))
    while todo:
        command = todo.popleft()
        left_s = started_at + 60 * minutes - time.monotonic()
        if left_s <= 0:
            outcomes.append("out of time")
            break
        if command[-2] == "--minutes":
            command[-1] = f"{left_s / 60 * OWN_SHARE:.3f}"
        env, ok_codes = environment(folder, is_toy=is_toy), OK_CODES.get(stage, (0,))
        outcome, lines = run_command(command, env, left_s, ok_codes)
        if outcome == "lost the device":
            todo.appendleft(command)
            continue
        outcomes.append(outcome)
        if outcome != "done":
            last_lines += lines
    worst = max(outcomes, key=("done", "out of time", "crashed").index)
    return Ended(worst, time.monotonic() - started_at, last_lines)


def run_command(
    command: Sequence[str], env: dict[str, str], limit_s: float, ok_codes: Sequence[int] = (0,)
) -> tuple[str, list[str]]:
    """Print what a command prints, and return how it ended and its last lines."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # A shell's background job ignores SIGINT, and so would its children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    last: deque[str] = deque(maxlen=N_LAST_LINES)

    def copy() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last.append(line.rstrip())

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    outcome = "done"
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        outcome = "out of time"
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    reader.join(GRACE_S)
    if outcome == "done" and process.returncode == LOST_DEVICE:
        outcome = "lost the device"
    elif outcome == "done" and process.returncode not in ok_codes:
        outcome = "crashed"
    return outcome, list(last)
