import subprocess
import sys
from pathlib import Path

import decode_operations
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_operations_are_counted_by_hand():
    weight = torch.ones(4, 4)
    # A sum, a product with a transposed view, a conversion with its copy, and a contiguous copy of a view.
    found = decode_operations.counted(lambda: ((weight + 1) @ weight.T).to(torch.float64).T.contiguous())
    assert found == {"operations": 4, "products": 1, "fused": 0, "other": 3}


@pytest.mark.slow
def test_compiled_layers_take_the_same_products_and_fewer_operations():
    # In another process, because torch.compile cannot trace the type checks of the test run.
    command = [sys.executable, "decode_operations.py", "--layers", "2", "--no-record"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    eager, compiled = (
        [int(value) for value in line.split()[1:5]]
        for line in done.stdout.splitlines()
        if line.startswith(("eager", "compiled"))
    )
    assert eager[1] == compiled[1] == 2 * 7  # query, key, value, output, gate, up, down
    assert compiled[2] > eager[2] == 0
    assert compiled[0] < eager[0] / 2
