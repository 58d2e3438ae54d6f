"""Preferences from datasets of the optional package, all on this machine."""

import random

import pytest

from lit_rlkv.tasks import load_preferences
from lit_rlkv.types import Message, Problem
from tests.tasks.lines import write_lines

ROWS = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"} for n in range(4)]
ASK = {"role": "user", "content": "Sky?"}
CHATS = [
    {"chosen": [ASK, {"role": "assistant", "content": "Blue."}]}
    | {"rejected": [ASK, {"role": "assistant", "content": color}]}
    for color in ("Green.", "Red.")
]


def problems(task):
    return [task.at(index) for index in range(len(task))]


def expected(rows):
    return [Problem(row["prompt"], row["chosen"], row["chosen"]) for row in rows]


def test_pairs_with_a_held_out_prompt_are_left_out(datasets, tmp_path, caplog):
    train = [*ROWS[:2], ROWS[3] | {"rejected": "9"}, ROWS[2]]
    both = {"train": train, "test": [ROWS[3], ROWS[3] | {"rejected": "8"}]}
    datasets.DatasetDict(
        {split: datasets.Dataset.from_list(rows) for split, rows in both.items()}
    ).save_to_disk(tmp_path / "a")
    task = load_preferences(str(tmp_path / "a"), eval_split="test")
    assert problems(task) == expected([*ROWS[:3], ROWS[3], ROWS[3]])
    assert [task.place(index).rpartition(" ")[2] for index in range(5)] == ["0", "1", "3", "0", "1"]
    assert {task.corrupt(task.at(3), random.Random(seed)) for seed in range(20)} == {"7", "8"}
    assert "1 rows of" in caplog.text
    with pytest.raises(ValueError, match="is also held out; give another eval_split"):
        load_preferences(str(tmp_path / "a"), eval_split="train")


def test_columns_may_have_other_names(datasets, tmp_path):
    renamed = [{"q": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in ROWS]
    path = write_lines(tmp_path / "data.jsonl", [row | {"prompt": 7} for row in renamed])
    columns = {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"}
    assert problems(load_preferences(path, **columns)) == expected(ROWS)


def test_conversations_contain_their_prompt(datasets, tmp_path):
    datasets.Dataset.from_list(CHATS).save_to_disk(tmp_path / "chats")
    task = load_preferences(str(tmp_path / "chats"), prompt_column=None)
    assert problems(task) == [Problem((Message("user", "Sky?"),), "Blue.", "Blue.")] * 2


def test_a_text_prompt_beside_conversations_is_accepted(datasets, tmp_path):
    path = write_lines(tmp_path / "data.jsonl", [row | {"prompt": "Sky?"} for row in CHATS])
    assert load_preferences(path).at(0).prompt == (Message("user", "Sky?"),)


def test_a_missing_column_is_named_with_those_that_exist(datasets, tmp_path):
    path = write_lines(tmp_path / "data.jsonl", CHATS)
    message = "no column 'prompt', it has chosen, rejected; set prompt_column, .* with prompt_column=null"
    with pytest.raises(ValueError, match=message):
        load_preferences(path)
