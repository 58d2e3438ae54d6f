"""Whole runs with reward functions of every kind of behaviour, through the config."""

import csv
import json
import math
import re

import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from lit_rlkv.config import CONF_DIR, ConfigError
from lit_rlkv.experience.reward import RewardsFailedError
from lit_rlkv.fit import fit
from lit_rlkv.runs.checks import check_reward_functions
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from tests.chat_templates import byte_tokenizer, trl_tokenizer
from tests.saved_models import save_checkpoint
from tests.whole_runs import MODEL, config, run

FLAKY = '''
import time
import zlib

def flaky(completion, solution):
    """Reward functions score a worked solution before the run."""
    if completion == solution:
        return 1.0
    fate = zlib.crc32(completion.encode()) % 12
    if fate == 0:
        raise OSError("the judge is out")
    if fate == 1:
        time.sleep(60)
    return {2: float("nan"), 3: float("inf")}.get(fate, fate / 12)

def never(completion, solution):
    if completion != solution:
        raise OSError("the judge is out")
    return 1.0

def always_fails(completion):
    return 1 / 0
'''


@pytest.fixture
def file(tmp_path):
    (tmp_path / "rewards.py").write_text(FLAKY)
    return tmp_path / "rewards.py"


def python(path, name, **options):
    given = {"_target_": "lit_rlkv.rewards.PythonFunction", "path": f"{path}:{name}"} | options
    inside = ", ".join(
        f"{key}: '{value}'" if isinstance(value, str) else f"{key}: {value}" for key, value in given.items()
    )
    return f"+reward.functions.{name}={{{inside}}}"


def test_a_run_survives_a_function_that_raises_hangs_and_answers_nan(tmp_path, file, caplog):
    numeric = "+reward.functions.number={_target_: lit_rlkv.rewards.Numeric, weight: 0.25}"
    results = run(
        tmp_path,
        "run",
        python(file, "flaky", timeout_s=0.3, weight=0.5),
        numeric,
        "reward.accuracy=number",
        "reward.max_failed=0.9",
        "algorithm.group_size=4",
        "diagnostics=none",
    )
    with (tmp_path / "run" / "metrics.csv").open(newline="") as lines:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
    assert len(rows) == 2
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(0 < row["reward/failed_fraction"] < 0.9 for row in rows)
    assert {"rewards/flaky/mean", "rewards/flaky/std", "rewards/number/mean", "rewards/exact_match"} <= rows[
        0
    ].keys()
    assert "reward.functions.flaky failed: " in caplog.text
    assert caplog.text.count("this warning is shown once") == 1
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert saved["after"][0]["accuracy"] == results.after[0].accuracy


def test_a_run_stops_when_too_many_rewards_fail_and_shows_the_error(tmp_path, file):
    with pytest.raises(
        RewardsFailedError, match=r"16 of 16 .* \(never: OSError: the judge is out \(rewards\.py"
    ):
        run(tmp_path, "run", python(file, "never"), "stages=[sft,rl]", "diagnostics=none")


def test_a_function_that_cannot_score_a_worked_solution_is_refused_before_any_work(tmp_path, file):
    parts = Run(config(tmp_path, python(file, "always_fails")))
    with pytest.raises(ConfigError, match=r"always_fails has no score for a worked .* ZeroDivisionError"):
        check_reward_functions(parts)
    imitates = Run(config(tmp_path, python(file, "always_fails"), "stages=[sft]"))
    check_reward_functions(imitates)  # nothing will ask it


def of_rows(tmp_path, rows, *overrides):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ["task=dataset", f"task.dataset={tmp_path / 'a.jsonl'}", "cache.policy=dense", "distillation=none"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=[*MODEL, *task, *overrides])
    return checked_config(cfg)


def test_worked_solutions_that_do_not_fit_are_named_by_row_and_so_are_prompts_alone(tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": "2" * 30 if n == 70 else "2"} for n in range(80)]
    with pytest.raises(ConfigError, match=r"max_new_tokens=24 cuts .* 1 of 80 .*a\.jsonl:71 \(31 tokens\)"):
        Run(of_rows(tmp_path, rows))
    length = "+reward.functions.a={_target_: lit_rlkv.rewards.Regex, pattern: a}"
    alone = ["task.answer_column=null", "reward.verifier=0", length]
    with pytest.raises(
        ConfigError, match=r"sft imitates worked solutions, and Problems\(.* has prompts alone"
    ):
        Run(of_rows(tmp_path, rows, *alone))
    Run(of_rows(tmp_path, rows, *alone, "stages=[rl,eval]"))


def test_answers_that_no_completion_could_be_compared_with_are_refused_by_row(tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": "x" if n == 70 else "2"} for n in range(80)]
    parts = Run(of_rows(tmp_path, rows, "reward=numeric"))
    with pytest.raises(ConfigError, match=r"task: .*a\.jsonl:71: the answer must be one number, got 'x'"):
        check_reward_functions(parts)


def test_solutions_below_full_score_are_counted_and_named(tmp_path, caplog):
    wrong = {3: "it is: 3 or 4", 7: "it is 8", 60: "it is: 60+1"}
    rows = [
        {"prompt": f"{n}+1=", "answer": str(n + 1), "solution": wrong.get(n, f"it is: {n + 1}")}
        for n in range(80)
    ]
    options = ["reward=numeric", "reward.functions.correct.answer_after=':'", "reward.verifier=0"]
    own = of_rows(tmp_path, rows, *options, "task.solution_column=solution")
    check_reward_functions(Run(own))
    (said,) = [record.getMessage() for record in caplog.records if "full score" in record.getMessage()]
    assert "reward.functions.correct gives less than full score to the solutions of 3 of 80 rows" in said
    assert all(f"a.jsonl:{line}" in said for line in (4, 8, 61))


PLAIN = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]


@pytest.mark.parametrize("task", ["rows", "task=chain_sum"])
@pytest.mark.parametrize("stages", ["[sft,rl]", "[rl,eval]"])
def test_a_reward_that_gives_0_to_all_solutions_is_refused_with_sft_and_else_warned_of(
    tmp_path, caplog, task, stages
):
    options = ["reward=numeric", "reward.verifier=0", f"stages={stages}"]
    cfg = of_rows(tmp_path, PLAIN, *options) if task == "rows" else config(tmp_path, task, *options)
    says = (
        r"reward\.functions\.correct gives less .* of (20 of 20|64 of 64) rows, .*reads what follows '####'"
    )
    if "sft" in stages:
        with pytest.raises(ConfigError, match=says):
            check_reward_functions(Run(cfg))
    else:
        check_reward_functions(Run(cfg))
        assert re.search(says, caplog.text)


def test_an_answer_alone_is_right_if_the_prompt_names_the_marker_or_there_is_none(tmp_path, caplog):
    named = [row | {"prompt": f"after a : comes {row['prompt']}"} for row in PLAIN]
    for rows, marker in ((named, "':'"), (PLAIN, "null")):
        options = ["reward=numeric", f"reward.functions.correct.answer_after={marker}", "stages=[rl]"]
        cfg = of_rows(tmp_path, rows, *options)
        check_reward_functions(Run(cfg))
    assert caplog.records == []


@pytest.mark.parametrize("names", [["flaky"], ["flaky", "never"]])
def test_prompts_alone_are_evaluated_by_the_only_function_and_of_several_one_must_be_named(
    tmp_path, file, names
):
    functions = [python(file, name) for name in names]
    options = [*functions, "task.answer_column=null", "reward.verifier=0"]
    for stages in ("[rl]", "[rl,eval]"):
        if stages == "[rl]" or len(names) == 1:
            found = of_rows(tmp_path, PLAIN, *options, f"stages={stages}").accuracy
            assert found == ("flaky" if len(names) == 1 else None)
        else:
            with pytest.raises(ConfigError, match=r"reward\.accuracy=null: .*set reward\.accuracy=flaky"):
                of_rows(tmp_path, PLAIN, *options, f"stages={stages}")
    assert of_rows(tmp_path, PLAIN, *options, f"reward.accuracy={names[-1]}").accuracy == names[-1]


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def save_byte_model(folder):
    """A random model that reads and writes bytes, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate(["<eos>", "<pad>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**shape, eos_token_id=0, pad_token_id=1))
    model.save_pretrained(folder)


def test_the_word_problems_train_a_checkpoint_by_their_preset(tmp_path):
    save_byte_model(tmp_path / "model")
    sizes = [
        "rollout.n_prompts=2",
        "rollout.max_new_tokens=12",
        "algorithm.n_iterations=1",
        "evaluation.n_prompts=3",
    ]
    room = ["cache.policy=snapkv", "cache.budget=128", "cache.interval=8", "cache.window=8"]
    options = ["task=word_problems", "reward=numeric", "stages=[rl,eval]", f"model.path={tmp_path / 'model'}"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        overrides = [*MODEL[:1], f"runs_dir={tmp_path}", *options, *room, *sizes, "evaluation.budgets=[64]"]
        cfg = compose("config", overrides=[*overrides, "diagnostics=none"])
    cfg = checked_config(cfg)
    fit(cfg, tmp_path / "run", Console(quiet=True))
    with (tmp_path / "run" / "metrics.csv").open(newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert {"rewards/correct/mean", "rewards/format/mean", "rewards/exact_match"} <= row.keys()
    assert float(row["reward/failed_fraction"]) == 0
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("system: Solve the problem step by step.")


@pytest.mark.parametrize(
    ("template", "overrides", "says"),
    [
        ("phi3_5", ["environment=tools"], r"environment\.role=tool: .*shows no messages of the role 'tool'"),
        ("gemma3", ["environment=tools"], r"environment\.role=tool: .*roles must alternate"),
        (None, ["environment=tools"], r"environment\.role=tool: .*no chat template"),
        ("idefics3", [], "leaves out texts of the user"),
        ("phi3_5", ["environment=tools", "environment.role=user"], None),
        ("phi3_5", ["environment=tools", "environment.role=null"], None),
        ("gptoss", ["environment=tools"], None),
    ],
)
def test_a_template_that_cannot_write_a_role_is_refused_before_work(tmp_path, template, overrides, says):
    tokenizer = trl_tokenizer(template) if template else byte_tokenizer("")
    tokenizer.chat_template = tokenizer.chat_template or None
    save_checkpoint(tmp_path / "model", tokenizer=tokenizer, vocab_size=len(tokenizer))
    cfg = config(tmp_path, "stages=[rl]", f"model.path={tmp_path / 'model'}", *overrides)
    if says is None:
        Run(cfg)
        return
    with pytest.raises(ConfigError, match=says):
        Run(cfg)


def test_an_option_of_another_type_is_told_without_internals_of_python(tmp_path):
    with pytest.raises(
        ConfigError, match=r"AdamW does not take .*betas=0\.9.*: one is of another type than it"
    ):
        config(tmp_path, "optimizer.betas=0.9")
