import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import count_instructions, read_usage

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


def test_kernels_are_told_from_what_they_call():
    found = launched_kernels()
    assert {"_attend", "_choose", "_move", "_norm", "_key_gradients", "_chosen_forward"} <= found
    assert not {"tanh", "load_vectors", "_write_received", "_image"} & found


def test_the_interpreter_compiles_nothing():
    done = run_compiled("--ops", "evict", TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET is set, under which nothing is compiled; unset it" in done.stderr


def test_registers_and_spills_are_read_off_what_cuobjdump_prints():
    # As Triton 3.6.0 and 3.7.1 print them; a device's resources stand before the kernel's.
    usage = (
        "\nResource usage:\n Common:\n  GLOBAL:28 CONSTANT[4]:16\n Function _key_gradients:\n"
        "  REG:255 STACK:192 SHARED:1024 LOCAL:8 CONSTANT[0]:656 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    )
    assert read_usage(usage) == (255, 200)


def test_instructions_are_counted_by_name():
    ptx = """
    .version 8.6
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 1;
    wgmma.commit_group.sync.aligned;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
    cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x8, %r2;
    cp.async.commit_group;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], [%r4];
    """
    assert count_instructions(ptx) == (2, 1, 3)
