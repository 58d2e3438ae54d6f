"""Compile the Triton kernels for NVIDIA GPUs, on any machine, and report their resources.

    python benchmarks/compiled.py [--arch 90] [--head-dims 64 128 256] [--dtypes bfloat16] [--ops evict]
    python benchmarks/compiled.py --calls rare --arch 80 --dtypes float32 [--record]

Each operation is called as it would be on the GPU, cut for the one of that compute capability named below, on
tensors without data; its kernels are compiled and not launched. Calls are the usual ones at real sizes or,
with `--calls rare`, what else the operations take (kernel_parts/calls.py). Printed are registers a thread,
bytes spilled a thread, shared memory of a program, and how many matrix and asynchronous-copy instructions
there are; a kernel with several lines was compiled in several variants. Kernels that take more shared memory
than a program can have are named, and the exit status is 1. `--record` keeps a row for each operation, type
and dimension.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any, NamedTuple

import command_line
import record
import torch
import triton
from kernel_parts.calls import CALLS
from text_table import text_table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lit_rlkv.kernels.device import A100, H100, L40S, Device, assume_device

NAME = "compiled"
OPS = ("decode_attention", "evict", "slot_scores", "shadow_attention", "token_logps", "token_sampling")
DEVICES = {80: A100, 89: L40S, 90: H100}
"""Targets of the compiler by compute capability times ten."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HEADINGS = (
    "operation",
    "type",
    "dim",
    "kernel",
    "registers",
    "spilled B",
    "shared B",
    "warps",
    "matrix",
    "wgmma",
    "async copies",
)


@dataclass(frozen=True)
class KernelReport:
    """Resources that a kernel takes of a multiprocessor."""

    name: str
    registers: int
    """Registers of each thread; at most 255."""
    spilled_bytes: int
    """Bytes that each thread spills to local memory."""
    shared_bytes: int
    """Bytes of shared memory of each program."""
    n_warps: int
    n_matrix: int
    """Matrix instructions of any kind."""
    n_wgmma: int
    """Number of these that read operands from shared memory (wgmma, Hopper)."""
    n_async_copies: int


class NoDevice:
    """Stands in for Triton's driver: there is a target to compile for, and nothing to run on."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def compiling_for(arch: int) -> Iterator[list[KernelReport]]:
    """Within the block launches are cut for this device and only compile; the list fills with the reports."""
    reports: list[KernelReport] = []
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        reports.append(_report(compiled))
        return compiled

    driver.set_active(NoDevice(arch))
    JITFunction.run = compile_only
    try:
        with assume_device(DEVICES[arch]):
            yield reports
    finally:
        JITFunction.run = launch


class Instructions(NamedTuple):
    """Numbers of instructions in PTX."""

    n_matrix: int
    n_wgmma: int
    n_async_copies: int


def count_instructions(ptx: str) -> Instructions:
    """Count by name. Triton 3.6 writes PTX up to version 8.6, and 3.7 up to 9.0; these names are the same."""
    return Instructions(
        n_matrix=len(re.findall(r"\bw?g?mma(?:\.mma_async)?\.sync\.aligned\.m", ptx)),
        n_wgmma=ptx.count("wgmma.mma_async"),
        n_async_copies=len(re.findall(r"\bcp\.async\.c[ag]\.", ptx)) + ptx.count("cp.async.bulk.tensor"),
    )


def read_usage(usage: str) -> tuple[int, int]:
    """Return registers and spilled bytes of a thread, from what cuobjdump says of a kernel.

    cuobjdump is asked because Triton's own numbers (`n_regs`, `n_spills`) need the kernel loaded on a GPU.
    Those of Triton 3.6 and 3.7 print the same fields.
    """
    taken = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return taken["REG"], taken["STACK"] + taken["LOCAL"]


def _report(compiled: Any) -> KernelReport:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled_bytes = read_usage(usage)
    return KernelReport(
        compiled.metadata.name,
        registers,
        spilled_bytes,
        compiled.metadata.shared,
        compiled.metadata.num_warps,
        *count_instructions(compiled.asm["ptx"]),
    )


def compile_operation(
    op: str, dtype: torch.dtype, dim: int, arch: int, calls: str = "usual"
) -> list[KernelReport]:
    """Every variant of the kernels that the operation launches, each once."""
    with compiling_for(arch) as reports:
        for call in CALLS[calls][op]:
            call(dtype, dim)
    return list(dict.fromkeys(reports))


def report(rows: Sequence[tuple[str, str, int, KernelReport]]) -> str:
    """One line for each variant of a kernel."""
    cells = [[op, dtype, str(dim), *map(str, astuple(found))] for op, dtype, dim, found in rows]
    return text_table(HEADINGS, cells, n_left=4)


def too_large(rows: Sequence[tuple[str, str, int, KernelReport]], device: Device) -> list[str]:
    """Return the reasons for which a device refuses the launch."""
    return [
        f"{kernel.name} of {op}, {dtype}, head_dim {dim}, takes {kernel.shared_bytes:,} bytes of shared "
        f"memory, and a program can have {device.program_bytes:,}"
        for op, dtype, dim, kernel in rows
        if kernel.shared_bytes > device.program_bytes
    ]


def main() -> None:
    args = parse_arguments()
    rows: list[tuple[str, str, int, KernelReport]] = []
    for op in args.ops:
        for dtype in args.dtypes:
            # Rows of logits have the vocabulary's width, whatever the heads'.
            for dim in args.head_dims[:1] if op.startswith("token_") else args.head_dims:
                found = compile_operation(op, DTYPES[dtype], dim, args.arch, args.calls)
                rows.extend((op, dtype, dim, kernel) for kernel in found)
                described = {"arch": args.arch, "calls": args.calls}
                described |= {"op": op, "dtype": dtype, "head_dim": dim}
                record.append(NAME, described | {"kernels": [asdict(kernel) for kernel in found]})
                print(f"{op}, {dtype}, head_dim {dim}: {len(found)} kernels compiled", flush=True)
    print(f"\nTriton {triton.__version__}, sm_{args.arch}\n{report(rows)}")
    if refused := too_large(rows, DEVICES[args.arch]):
        raise SystemExit("\n".join(refused))


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--arch", type=int, choices=DEVICES, default=90, help="compute capability times ten")
    parser.add_argument("--calls", choices=("usual", "rare"), default="usual")
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, under which nothing is compiled; unset it")
    return args


if __name__ == "__main__":
    main()
