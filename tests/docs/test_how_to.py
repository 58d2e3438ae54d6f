"""The pages on modules of your own: their code and commands work as they stand, made smaller by overrides."""

import json
import re
import shlex

import pytest
from rich.console import Console

from lit_rlkv.cli import compose_arguments
from lit_rlkv.config import ConfigError, check_keys
from lit_rlkv.evaluate import evaluate
from lit_rlkv.fit import fit
from lit_rlkv.rewards import MathVerify
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.trust import trusting
from lit_rlkv.types import NEVER
from tests.docs.pages import DOCS, TRUST, code_blocks
from tests.rewards.helpers import opened
from tests.whole_runs import MODEL, plain_reports, rows_of, scoring

PAGES = DOCS / "how-to"
SMALL = [
    *("debug=fast", "diagnostics=none", "sft.n_steps=2", "sft.steps_per_iteration=1"),
    *("sft.on_policy_pairs.n_steps=1", "cache.budget=7", "cache.interval=2", "cache.window=2"),
    *("rollout.n_prompts=4", "evaluation.n_prompts=4", "evaluation.budgets=[]"),
]


def blocks(page, language):
    """The code blocks of a page in one language."""
    return code_blocks((PAGES / f"{page}.md").read_text(), language)


def page_names():
    """The pages whose command trusts `mypackage`."""
    return sorted(path.stem for path in PAGES.glob("own-*.md") if TRUST in path.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds `mypackage` with the modules of all pages, and the runs, which share their SFT models."""
    folder = tmp_path_factory.mktemp("how_to")
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "__init__.py").touch()
    for page in page_names():
        (code,) = blocks(page, "python")
        (place,) = re.findall(r"Write `(mypackage/\w+\.py)`", (PAGES / f"{page}.md").read_text())
        (folder / place).write_text(code)
    return folder


@pytest.fixture
def run_page(folder, monkeypatch):
    """Run the first command of a page; return its folder and its results."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)

    def run(page, *small):
        command, *_ = blocks(page, "bash")
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "lit_rlkv.fit"]
        small = (*SMALL, f"runs_dir={folder}/runs", *(small or MODEL))
        with trusting([]), plain_reports():
            cfg, hydra_cfg = compose_arguments("config", [*words[3:], *small])
            check_keys(cfg, hydra_cfg.runtime.choices, hydra_cfg.overrides.task)
            cfg = checked_config(cfg)
            return folder / page, fit(cfg, folder / page, Console(quiet=True))

    return run


def test_the_index_names_every_page():
    index = (PAGES / "README.md").read_text()
    assert page_names()
    assert sorted(re.findall(r"\(([\w-]+)\.md\)", index)) == sorted(
        path.stem for path in PAGES.glob("*.md") if path.stem != "README"
    )


def test_own_policy_decides_what_is_evicted_and_needs_trust_again(run_page):
    run_dir, results = run_page("own-policy")
    assert [row.cache for row in results.after] == ["dense", "Every n=3 7+2"]
    is_whole = results.rollout.attention_mask[:, -1]  # in one that ends earlier, its latest keys stay
    evicted_at = results.rollout.evicted_at[is_whole]
    assert is_whole.any()
    is_kept = (evicted_at == NEVER).float().mean(dim=(0, 1, 2))
    first = int(results.rollout.attention_mask.any(dim=0).nonzero().min())
    middle = range(first + 1, len(is_kept) - 3)
    assert all(is_kept[c] == 0 for c in middle if c % 3 != 0 and c < len(is_kept) - 6)
    with pytest.raises(ConfigError, match=r"cache\.policy='mypackage.*add trusted_modules=\[mypackage\]"):
        evaluate(scoring(run_dir))
    assert "trusted_modules" not in (run_dir / "config.yaml").read_text()
    with trusting(["mypackage"]):
        assert [row.cache for row in evaluate(scoring(run_dir)).rows] == ["dense", "Every n=3 7+2"]


def rewards_are_sums(row):
    total = float(row["rewards/exact_match"]) + 0.1 * float(row["rewards/short/mean"])
    return float(row["rewards/short/mean"]) > 0 and float(row["reward"]) == pytest.approx(total, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "is_right"),
    [
        ("own-callback", lambda row: 0 < float(row["distinct_answers"]) <= 1),
        ("own-reward", rewards_are_sums),
        ("own-trained-policy", lambda row: float(row["eviction/logp"]) < 0),
        ("own-environment", lambda row: 1 < float(row["completions/mean_turns"]) <= 3),
        ("own-algorithm", lambda row: row["reinforce_loss"] and "policy_loss" not in row),
        ("own-loss-term", lambda row: float(row["stay_close"]) >= 0),
    ],
)
def test_every_iteration_logs_what_the_module_of_the_page_adds(run_page, page, is_right):
    rows = rows_of(run_page(page)[0])
    assert len(rows) == 2
    assert all(map(is_right, rows))
    if page == "own-loss-term":  # the policy has left its start
        assert float(rows[-1]["stay_close"]) > 0


@pytest.mark.slow
def test_own_task_gives_the_prompts(run_page):
    run_dir, _ = run_page("own-task")
    prompts = [json.loads(line)["prompt"] for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert prompts
    assert all(re.fullmatch("[a-h]{5}>", prompt) for prompt in prompts)


@pytest.mark.slow
def test_own_logger_gets_every_iteration(run_page, folder):
    run_page("own-logger")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if "reward" in line} == {1, 2}


@pytest.mark.slow
def test_own_model_is_trained(run_page):
    run_dir, _ = run_page("own-model", "+model.preset.n_layers=1")
    model = json.loads((run_dir / "backbone" / "config.json").read_text())
    assert (model["model_type"], model["hidden_size"], model["num_hidden_layers"]) == ("llama", 64, 1)


def test_the_limits_of_math_verify_are_as_the_page_says():
    pytest.importorskip("math_verify")
    page = (PAGES / "own-data.md").read_text().partition("### Mathematical answers")[2]
    limits = re.findall(r"^\| `(.+?)` \| `(.+?)` \| ([01]) \|", page, re.M)
    assert len(limits) > 10
    with opened(MathVerify(timeout_s=60)) as ask:
        found = [(answer, response, str(int(ask(response, answer)))) for answer, response, _ in limits]
    assert found == limits
