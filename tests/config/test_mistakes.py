"""Mistakes are told in one line before torch is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.asking import refusal

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from lit_rlkv.fit import main
for arguments in sys.stdin.read().splitlines():
    sys.argv = ["fit", *arguments.split()]
    try:
        main()
    except SystemExit as error:
        print(error)
assert not {"torch", "transformers", "lightning", "huggingface_hub"} & {*sys.modules}
"""
BEFORE_TORCH = {
    "num_generations=4": "write 'algorithm.group_size'",
    "--seed=3": "write seed=3",
    "optimizer.lr=0": "must be a number above 0",
    "cache.interval=0": "cache.interval must be a whole number of at least 1, got 0",
    "cache.budget=3": "cache: budget must be at least sink + window + 1 = 5, got 3; raise the budget",
    "evaluation.budgets=[16,4]": "evaluation.budgets: budget must be at least sink + window + 1 = 5, got 4",
    "cache.policy=snapvk": "cache: unknown cache policy 'snapvk'; choose one of dense, streaming, ",
    "cache.policy=snapkv +cache.policy_options.pool=3": "{'pool': 3} have no effect on snapkv; leave",
    "cache.policy=mypackage.policies.Mine": "add trusted_modules=[mypackage] to the command line",
}


def test_mistakes_are_told_before_torch_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(BEFORE_TORCH),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert len(said) == len(BEFORE_TORCH)
    assert [line for line, says in zip(said, BEFORE_TORCH.values(), strict=True) if says not in line] == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.n_splits=${nope}", "rollout.n_splits: Interpolation key 'nope' not found; give a value"),
        ("seed=${oc.env:NO_SUCH_VARIABLE}", "seed: .*Environment variable 'NO_SUCH_VARIABLE' not found"),
        ("evaluation.budgets=[${eval:1}]", r"evaluation.budgets\[0\]: Unsupported interpolation type eval"),
        ("runs_dir=${runs_dir}", "runs_dir: Recursive interpolation"),
        (r"runs_dir='a\${seed}'", r"runs_dir=a\$\{seed\}: a text cannot have '\$\{' in it"),
        (r"evaluation.budgets=['\${eval:1}']", r"evaluation.budgets=\[.*\]: a text cannot have '\$\{' in it"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_named_with_its_key(override, says):
    assert re.match(says, refusal(override))
