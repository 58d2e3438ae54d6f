"""docs/reference/metrics.md lists what a run logs: nothing is missing there, and nothing in it is made up."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.saved_models import save_checkpoint
from tests.whole_runs import run

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "metrics.md").read_text()
ROWS = re.findall(r"^\| (`.+?) \|(.*)\|$", PAGE, re.M)
ON_CUDA = "CUDA"
"""A row that says so is logged there only."""
RUNS = {
    "smd": [
        "experiment=smd",
        "correction.bypass_mode=false",
        "diagnostics.gradient_sources.counterfactual=tis",
        "diagnostics.performance.peak_flops=1e12",
        "evaluation.perplexity=FOLDER/texts.jsonl",
    ],
    "tis": ["experiment=tis", "algorithm.kl.weight=0.1", "cache.target_overlap=0.86", "algorithm.resample=1"],
    "curriculum": [
        "task=jsonl",
        "task.path=tests/data/sums.jsonl",
        "~task.n_terms",
        "algorithm.curriculum.decay=0.9",
        "distillation=teacher",
        "distillation.model=FOLDER/a-teacher",
    ],
    "rlhf": [
        "experiment=rlhf",
        "sft.on_policy_pairs.n_prompts=0",
        "reward=mixed",
        "+reward.functions.number={_target_: lit_rlkv.rewards.Numeric, weight: 0.1}",
    ],
    "remax": ["algorithm=remax", "diagnostics=none"],
    "online_dpo": ["experiment=online_dpo_smd"],
    "tools": ["experiment=tools", "rollout.max_new_tokens=80", "reward.environment=1", "diagnostics=none"],
    "learned": ["experiment=shadow", "cache.policy=learned", "sft.eviction_steps=50", "diagnostics=none"],
}


def patterns(listed):
    """Each name of the page as a pattern; {x} is any part without a slash."""
    return [re.sub(r"\\{.+?\\}", "[^/]+", re.escape(name)) for name in re.findall(r"`([^`]+)`", listed)]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    names = set()
    save_checkpoint(folder / "a-teacher")
    (folder / "texts.jsonl").write_text('{"text": "1+2+3=  1  3  6"}')
    for name, overrides in RUNS.items():
        run(folder, name, "roles.rank=2", *(each.replace("FOLDER", str(folder)) for each in overrides))
        for path in (folder / name).glob("*metrics.csv"):
            with path.open(newline="") as file:
                names |= set(next(csv.reader(file)))
        names |= json.loads((folder / name / "evaluation.json").read_text())["final"].keys()
    return names


@pytest.mark.slow
def test_every_logged_name_is_in_the_dictionary_once(logged):
    known = [pattern for listed, _ in ROWS for pattern in patterns(listed)]
    found = {name: sum(re.fullmatch(pattern, name) is not None for pattern in known) for name in logged}
    assert {name: n for name, n in found.items() if n != 1} == {}


@pytest.mark.slow
def test_nothing_in_the_dictionary_is_never_logged(logged):
    wanted = [pattern for listed, rest in ROWS if ON_CUDA not in rest for pattern in patterns(listed)]
    missing = [pattern for pattern in wanted if not any(re.fullmatch(pattern, name) for name in logged)]
    assert missing == []


def test_every_row_says_what_a_bad_value_looks_like():
    tables = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(tables) == len(ROWS) > 30
    for line in tables:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) == 4, line
        assert all(cells), line
