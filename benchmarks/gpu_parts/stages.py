"""Stages of a GPU run: the commands of each, in processes of their own, which end in time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS, LOG, PAGE = "gpu.jsonl", "gpu.log", "gpu.md"
"""All that a run leaves in its folder; the first is all that a restart needs."""
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path.home() / ".cache" / "lit_rlkv"
"""Folder of compiled kernels."""
OWN_SHARE = 0.85
"""Share of a stage's time after which a command starts no new measurement."""
GRACE_S = 15.0
"""Seconds between the signal that ends a command as Ctrl-C does, and the one that it cannot refuse."""
N_LAST_LINES = 30
TITLES = {
    "T": "tests that the rest stands on",
    "G": "replay gap",
    "R": "learning from scratch",
    "K": "shadow attention at 16,384 tokens",
    "O": "methods on one GPU, 1.5B, 8,192 tokens",
    "A": "all tests",
    "D": "learner",
    "P": "profile of the learner",
    "E": "longest sequence that learns",
    "H": "shared prompts",
    "C": "rollout",
    "M": "memory, planned and measured",
    "S": "learning with SmolLM2-135M",
    "B": "kernels",
}
"""In the order in which they are worth their time: 15 minutes reach to O."""
MINUTES = {"T": 4.0, "G": 2.5, "R": 5.0, "K": 2.5, "O": 3.0}
"""Most of a stage; of others `MOST_MINUTES`."""
MOST_MINUTES = 8.0
NEEDED = ("hydra", "lightning", "omegaconf", "peft", "matplotlib", "pydantic", "jinja2", "httpx")
"""Packages of whole runs, which a lent machine may lack."""
OF_RUNS = ("R", "O", "M", "S")
"""Stages that need them."""
ROOMS_OF_RUNS = ("benchmarks", "callbacks", "modules", "runs")
"""Folders of tests that need them."""
FIRST_TESTS: dict[tuple[str, ...], str | None] = {
    ("tests/rollout/test_turns.py",): None,
    ("tests/rollout/test_decoder.py", "tests/rollout/test_graph.py"): None,
    ("tests/kernels/test_shadow_kernels.py",): "at_real_sizes and dtype2 and 128",
    ("tests/kernels/test_attention_sinks.py",): None,
    ("tests/models/test_lm_head.py",): None,
    ("tests/kernels/test_decode_attention.py",): "codes or every_code",
}
"""Files of stage T, each key a process, and pytest's -k."""
SEGMENTS = "tests/kernels/test_*segment*.py"
N_PROCESSES = 6
"""Processes of the tests, most of whose time is compilation."""
TOY_TESTS = ("tests/kernels/test_triton_functions.py", "tests/kernels/test_device.py")

Command = list[str]
OUTCOMES = ("done", "out of time", "crashed")
"""From the best to the worst."""


@dataclass(frozen=True)
class Ended:
    """How a stage or a command ended."""

    outcome: str
    """`done`, `left out`, `crashed`, or `out of time`."""
    seconds: float
    last_lines: list[str]


def commands(stage: str, *, is_toy: bool) -> list[list[Command]]:
    """Return the commands of a stage: those of an inner list run at the same time."""
    return [*tests_of(stage, is_toy=is_toy), *([command] for command in benchmarks_of(stage, is_toy=is_toy))]


def tests_of(stage: str, *, is_toy: bool) -> list[list[Command]]:
    """Return the pytest commands of a stage."""
    if is_toy and stage in ("T", "A"):
        return [[pytest_command(TOY_TESTS, "not slow and not gpu")]]
    if stage == "T":
        segments = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(SEGMENTS))]
        chosen = FIRST_TESTS | ({tuple(segments): None} if segments else {})
        return [[pytest_command(files, "gpu", only) for files, only in chosen.items()]]
    if stage == "A":
        files = gpu_tests()
        return [[pytest_command(files[i::N_PROCESSES], "gpu") for i in range(N_PROCESSES)]]
    return []


def gpu_tests() -> list[str]:
    """Return the files with GPU tests, without those that need packages which are missing."""
    files = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text())
    left_out = ROOMS_OF_RUNS if missing() else ()
    return [str(path.relative_to(ROOT)) for path in files if path.parent.name not in left_out]


def missing() -> list[str]:
    """Return which packages of whole runs this machine lacks."""
    return [name for name in NEEDED if find_spec(name) is None]


def why_left_out(stage: str, *, is_toy: bool) -> str | None:
    """Return why a stage cannot run here; None if it can."""
    if stage in OF_RUNS and (names := missing()):
        return f"packages are missing: {', '.join(names)}"
    if stage == "S" and not is_toy and not (MODEL.is_file() and find_spec("gguf")):
        return f"there is no models/{MODEL.name} (make smollm2), or no package gguf"
    return None


def benchmarks_of(stage: str, *, is_toy: bool) -> list[Command]:
    """Return the benchmarks of a stage; each is told how many minutes are left when it starts."""
    timed = (TOY if is_toy else REAL).get(stage, [])
    if stage == "G" and not is_toy and MODEL.is_file() and find_spec("gguf"):
        timed = [*timed, f"replay_gap.py --model {MODEL} --budget 256 --new 512"]
    return [
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--minutes", "0"]
        for script, *arguments in map(str.split, timed)
    ]


SHADOW = "kernels.py --record --ops shadow_attention"
LEARNER = "learner.py --record"
LONG = f"{LEARNER} --budgets 1024 --levers frozen+host --rounds 1"
REAL = {
    "G": ["replay_gap.py --record"],
    "R": ["learns.py --record"],
    # FlexAttention's compiler takes a minute for a length of shadow attention.
    "K": [f"{SHADOW} --only 16384_tokens --skip-flex"],
    "O": ["one_gpu.py --record --shapes 1.5b --lengths 8192 --bits 16"],
    "D": [f"{LEARNER} --lengths 16384 --levers none frozen frozen+compiled frozen+host"],
    "P": [f"{LEARNER} --profile --lengths 16384 --budgets 1024 --levers none frozen+compiled"],
    "E": [
        f"{LONG} --lengths 65536",
        f"{LONG} --lengths 131072 262144 524288 --skip-dense",
    ],
    "H": ["kernels.py --record --ops shared_prompt --rounds 5"],
    "C": [
        "rollout.py --record --rounds 1 --budgets 1024",
        "rollout.py --record --rounds 1 --budgets 1024 --skip-theirs --compile-layers",
        "rollout.py --record --rounds 1 --budgets 512 2048 --skip-theirs",
    ],
    "M": ["plan_peaks.py --record"],
    "S": ["learns.py --record --task smollm2"],
    "B": [
        *(
            f"kernels.py --record --ops {op}"
            for op in ("decode_attention", "token_logps", "token_sampling", "slot_scores", "evict")
        ),
        SHADOW,
    ],
}
TOY_RUN = "--device cpu --record"
TOY_LEARNER = f"learner.py {TOY_RUN} --rounds 1 --layers 1 --budgets 8 --interval 4 --prompt 6"
TOY = {
    "G": [f"replay_gap.py {TOY_RUN} --batch 2 --new 32 --budget 16"],
    "R": ["learns.py --record --toy"],
    "K": [
        f"kernels.py {TOY_RUN} --rounds 1 --ops shadow_attention --only 96_tokens,_budget_32 --skip-flex",
    ],
    "O": ["one_gpu.py --record --toy --bits 16 --methods dense shadow"],
    "D": [f"{TOY_LEARNER} --lengths 24 --levers none frozen"],
    "P": [f"{TOY_LEARNER} --profile --lengths 24 --skip-dense"],
    "E": [f"{TOY_LEARNER} --lengths 32 --levers frozen+host --skip-dense"],
    "C": [f"rollout.py {TOY_RUN} --rounds 1 --batch 2 --new 24 --budgets 16 --skip-theirs"],
    "M": [f"plan_peaks.py {TOY_RUN} --cases qwen3-lora"],
    "B": [
        f"kernels.py {TOY_RUN} --rounds 1 --ops {op} --only {only}"
        for op, only in (("decode_attention", "3"), ("evict", "1_of_2"))
    ],
}
"""A CPU can run these; their figures mean nothing."""
LOST_DEVICE = 77
"""Exit status of tests that left the device unusable."""
TESTS_DID_THEIR_WORK = (0, 1, 5)
"""Exit statuses of pytest: passed, failed (the table shows it), none left to run."""


def pytest_command(tests: Sequence[str], marker: str, chosen: str | None = None) -> Command:
    """Return pytest on these tests, without the options of pyproject.toml that need further packages."""
    options = [
        "-o",
        "addopts=--import-mode=importlib",
        "-o",
        "filterwarnings=",
        "-p",
        "gpu_parts.pytest_rows",
    ]
    choice = [] if chosen is None else ["-k", chosen]
    return [sys.executable, "-m", "pytest", "-q", "--tb=short", *options, "-m", marker, *choice, *tests]


def environment(folder: Path, *, is_toy: bool) -> dict[str, str]:
    """Return the environment of the commands.

    Rows go to one file of the folder, memory grows in place, and what one command has compiled the next one
    finds.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    ours = {
        "BENCHMARK_RESULTS": str(folder.resolve() / ROWS),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(CACHE / "triton")),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor")),
    }
    return os.environ | ours | ({"CUDA_VISIBLE_DEVICES": ""} if is_toy else {})


def run_stage(stage: str, folder: Path, minutes: float, *, is_toy: bool) -> Ended:
    """Run the commands of a stage; one that fails does not stop the next."""
    started_at = time.monotonic()
    env, log = environment(folder, is_toy=is_toy), folder / LOG
    if (why := why_left_out(stage, is_toy=is_toy)) is not None:
        say(f"left out: {why}", log)
        return Ended("left out", 0.0, [])
    ended = []
    for group in commands(stage, is_toy=is_toy):
        ends_at = started_at + 60 * minutes
        with ThreadPoolExecutor(len(group)) as pool:
            run = partial(run_until, env=env, log=log, ends_at=ends_at)
            ended += pool.map(run, group)
    worst = max((one.outcome for one in ended), key=OUTCOMES.index, default="done")
    last_lines = [line for one in ended if one.outcome != "done" for line in one.last_lines]
    return Ended(worst, time.monotonic() - started_at, last_lines)


def run_until(command: Command, *, env: dict[str, str], log: Path, ends_at: float) -> Ended:
    """Run a command until a moment; tests that lose the device start again, without the one that lost it."""
    started_at = time.monotonic()
    while (left_s := ends_at - time.monotonic()) > 0:
        if command[-2] == "--minutes":
            command = [*command[:-1], f"{left_s / 60 * OWN_SHARE:.3f}"]
        ok_codes = TESTS_DID_THEIR_WORK if "pytest" in command else (0,)
        outcome, lines = run_command(command, env, left_s, ok_codes, log)
        if outcome != "lost the device":
            return Ended(outcome, time.monotonic() - started_at, lines)
    return Ended("out of time", time.monotonic() - started_at, [])


def say(text: str, log: Path | None) -> None:
    """Print, and keep it in the log of the run."""
    print(text, flush=True)
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def run_command(
    command: Sequence[str],
    env: dict[str, str],
    limit_s: float,
    ok_codes: Sequence[int] = (0,),
    log: Path | None = None,
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
            say(line.rstrip(), log)
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
