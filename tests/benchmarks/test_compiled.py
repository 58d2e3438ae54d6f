import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ALLOWED_SPILLS = {"_key_gradients": 256}
"""Bytes a thread; all other kernels spill none. See the README of shadow_attention."""


def run_compiled(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the program in a process that compiles kernels; this one interprets them."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "compiled.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=inherited | environment,
    )


def launched_kernels() -> set[str]:
    """Names of all Triton functions of the package that some host function launches."""
    sources = "\n".join(path.read_text() for path in (ROOT / "lit_rlkv" / "kernels").rglob("*.py"))
    functions = set(re.findall(r"@triton\.jit\n@no_type_check\ndef (\w+)", sources))
    return functions & set(re.findall(r"\b(\w+)\[", sources))


@pytest.mark.slow
def test_every_kernel_compiles_without_spilling(tmp_path: Path):
    done = run_compiled("--head-dims", "128", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    _, table = done.stdout.split("async copies\n")
    rows = [line.split() for line in table.splitlines()]
    spilled = {}
    for _, dtype, dim, kernel, registers, spilled_bytes, *_ in rows:
        assert (dtype, dim) == ("bfloat16", "128")
        assert 0 < int(registers) <= 255
        spilled[kernel] = max(int(spilled_bytes), spilled.get(kernel, 0))
    assert set(spilled) == launched_kernels()
    assert {kernel for kernel, n in spilled.items() if n > ALLOWED_SPILLS.get(kernel, 0)} == set()
    # What the model of waves assumes of dK and dV: one program takes most registers, and its tiles the rest.
    for *_, registers, _, shared, warps, _, _, _ in [row for row in rows if row[3] == "_key_gradients"]:
        assert 2 * int(registers) * 32 * int(warps) > 65_536
        assert 0 <= int(shared) - (128 + 3 * 64) * 2 * 128 * 2 <= 8192
    # Where tiles have 64 rows and more, Hopper's own matrix instructions are used.
    n_wgmma = {row[3]: int(row[-2]) for row in rows}
    assert min(n_wgmma[kernel] for kernel in ("_forward", "_query_gradients", "_key_gradients")) > 0
