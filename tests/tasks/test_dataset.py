"""Problems from files and datasets with columns of any name."""

import logging
import random
import sys

import pytest
from omegaconf import OmegaConf

from lit_rlkv.config import CONF_DIR
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.tasks import UserTask, load_problems
from lit_rlkv.types import Message, Problem
from tests.tasks.lines import write_lines

ROWS = [{"question": f"{n}+{n}?", "answer": f"{n} and {n}.\n#### {2 * n}", "level": n} for n in range(1, 5)]
GSM8K = {
    "prompt_column": "question",
    "answer_column": None,
    "solution_column": "answer",
    "answer_after": "####",
}


def problems(task):
    return [task.at(index) for index in range(len(task))]


def expected(rows):
    return [Problem(row["question"], row["answer"], row["answer"].split()[-1]) for row in rows]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder", "saved", "saved splits"])
def test_rows_of_every_format_become_problems(datasets, tmp_path, kind):
    rows, path = datasets.Dataset.from_list(ROWS), tmp_path / f"data.{kind}"
    if kind in ("jsonl", "json"):
        write_lines(path, ROWS)
    elif kind == "parquet":
        rows.to_parquet(str(path))
    elif kind == "folder":
        path.mkdir()
        rows.to_parquet(str(path / "train.parquet"))
        rows.select([0]).to_parquet(str(path / "test.parquet"))
    elif kind == "saved":
        rows.save_to_disk(str(path))
    else:
        datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(path))
    task = load_problems(str(path), **GSM8K)
    assert isinstance(task, UserTask)
    assert problems(task) == expected(ROWS)
    assert task.score(task.at(0), "#### 2") == 1.0
    assert task.score(task.at(0), "#### 3") == 0.0
    if kind in ("folder", "saved splits"):
        assert problems(load_problems(str(path), split="test", **GSM8K)) == expected(ROWS[:1])
    if kind in ("jsonl", "parquet"):
        assert problems(load_problems(str(path), split="train[1:3]", **GSM8K)) == expected(ROWS[1:3])


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        ("data.jsonl", {"split": "test"}, "cannot load split 'test' of .*data.jsonl'"),
        ("saved", {"split": "test"}, "cannot load split 'test' of .*it was saved with train;"),
        ("folder", {"name": "other"}, "cannot load split 'train' of .*other"),
        ("data.txt", {}, "cannot load split 'train' of .*data.txt.*another type"),
        ("none.parquet", {}, "cannot load split 'train' of .*none.parquet"),
        ("nowhere", {}, "cannot load split 'train' of .*nowhere.*give a name on the hub, a folder"),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_one_error(datasets, tmp_path, dataset, options, says):
    rows = datasets.Dataset.from_list(ROWS)
    write_lines(tmp_path / "data.jsonl", ROWS)
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "train.jsonl", ROWS)
    rows.save_to_disk(tmp_path / "saved")
    rows.select([]).to_parquet(tmp_path / "none.parquet")
    (tmp_path / "data.txt").write_text("?")
    with pytest.raises(ValueError, match=says):
        load_problems(str(tmp_path / dataset), **options)


def test_rows_of_the_eval_split_are_never_trained_on(datasets, tmp_path, caplog):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(str(tmp_path / "data"))
    with caplog.at_level(logging.WARNING):
        task = load_problems(str(tmp_path / "data"), eval_split="test", **GSM8K)
    assert "1 rows of " in caplog.text
    assert "are also held out; they are not trained on" in caplog.text
    by_split = {
        split: {problem.prompt for problem in PromptSource(task, split=split, seed=0).take(12)}
        for split in ("train", "eval")
    }
    assert by_split == {"train": {"1+1?", "3+3?", "4+4?"}, "eval": {"2+2?"}}
    assert [task.place(index).split("/")[-1] for index in (1, 3)] == ["data row 2", "data test row 0"]
    drawn = {task.sample(random.Random(seed)).prompt for seed in range(50)}
    assert drawn == by_split["train"]


def test_without_an_eval_split_about_one_in_ten_is_held_out(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(300)]
    task = load_problems(write_lines(tmp_path / "a.jsonl", rows))
    sizes = [PromptSource(task, split=split, seed=0).size for split in ("train", "eval")]
    assert sum(sizes) == 300
    assert 10 < sizes[1] < 60


def test_json_lines_need_no_package(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert problems(load_problems(path, **GSM8K)) == expected(ROWS)
    with pytest.raises(ImportError, match=r"'owner/name' needs the package datasets.*\[data\]"):
        load_problems("owner/name")


def test_the_system_prompt_comes_first_unless_a_chat_has_its_own(tmp_path):
    ask, own = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}
    prompts = ["hi", [ask], [own, ask]]
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "x"} for prompt in prompts])
    user = Message("user", "hi")
    found = [problem.prompt for problem in problems(load_problems(path, system_prompt="ours"))]
    ours = (Message("system", "ours"), user)
    assert found == [ours, ours, (Message("system", "own"), user)]
    assert [problem.prompt for problem in problems(load_problems(path))] == ["hi", (user,), found[2]]


def test_extra_columns_are_kept_for_reward_functions(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    assert load_problems(path, **GSM8K, extra_columns=["level"]).at(2).extra == {"level": 3}
    with pytest.raises(ValueError, match="extra_columns must not have the reserved names completion"):
        load_problems(path, extra_columns=["completion"])


def test_solutions_beyond_the_answer_leave_no_own_score(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"q": "?", "a": "4", "s": "it is 4, I think"}])
    columns = {"prompt_column": "q", "answer_column": "a", "solution_column": "s"}
    task = load_problems(path, **columns)
    assert not task.is_verifiable
    assert task.at(0) == Problem("?", "it is 4, I think", "4")
    rejected = task.corrupt(task.at(0), random.Random(0))
    assert rejected != "it is 4, I think"
    assert rejected.startswith("it is ")
    assert rejected.endswith(", I think")
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1: the solution .* must end in '####' and the answer '4'"
    ):
        load_problems(path, **columns, answer_after="####")


def test_prompts_alone_have_no_solution(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "?"}])
    task = load_problems(path, answer_column=None)
    assert task.at(0) == Problem("?", "", "")
    assert not task.is_verifiable
    assert task.score(task.at(0), "") == 0.0
    with pytest.raises(ValueError, match="has prompts but no solutions to corrupt"):
        task.corrupt(task.at(0), random.Random(0))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "?", "answer": "1"}, "must have '####' before an answer; add it or set answer_after"),
        ({"question": "?", "answer": None}, "solution must be text, got None"),
        ({"question": "?"}, "no column 'answer', it has question; set prompt_column"),
    ],
)
def test_every_bad_row_is_named_by_its_line(tmp_path, row, says):
    path = write_lines(tmp_path / "a.jsonl", [ROWS[0], "", row, ROWS[1], row])
    with pytest.raises(ValueError, match="2 of 4 rows cannot be used") as caught:
        load_problems(path, **GSM8K)
    _, first, second = str(caught.value).split("\n  ")
    assert f"{path}:3: " in first
    assert says in first
    assert f"{path}:5: " in second


def test_bad_rows_of_a_dataset_are_named_by_their_index(datasets, tmp_path):
    rows = [*ROWS, {"question": "?", "answer": "none", "level": 0}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"a\.parquet row 4: the solution 'none' must have '####'"):
        load_problems(str(tmp_path / "a.parquet"), **GSM8K)
    with pytest.raises(
        ValueError, match="no column 'prompt', it has question, answer, level; set prompt_col"
    ):
        load_problems(str(tmp_path / "a.parquet"))


def test_a_solution_column_needs_a_marker_or_an_answer_column(tmp_path):
    with pytest.raises(ValueError, match="solution_column='answer' needs a way to find its answers"):
        load_problems("a.jsonl", answer_column=None, solution_column="answer")


@pytest.mark.parametrize("name", ["gsm8k", "word_problems"])
def test_the_system_prompt_names_the_answer_marker(name):
    cfg = OmegaConf.load(CONF_DIR / "task" / f"{name}.yaml")
    assert cfg.system_prompt.endswith(f"{cfg.answer_after}.")


def test_the_example_word_problems_have_right_answers():
    task = load_problems("example:word_problems.jsonl", **GSM8K)
    assert len(task) == len({problem.prompt for problem in problems(task)}) == 48
    for problem in problems(task):
        *steps, last = problem.solution.split("\n")
        assert last == f"#### {problem.answer}"
        assert problem.answer.replace(",", "").isdigit()
        assert problem.answer.replace(",", "") in " ".join(steps).replace(".", "").split()
    with pytest.raises(ValueError, match="there is no 'example:other'; the package has example:word_prob"):
        load_problems("example:other", **GSM8K)
