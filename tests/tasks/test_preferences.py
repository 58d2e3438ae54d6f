"""Preferences from a file of JSON lines."""

import json
import random

import pytest

from lit_rlkv.data.demonstrations import preference_pair
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.tasks import FiniteTask, Preferences, Recall, read_preferences
from lit_rlkv.tasks.preferences import parse_pair
from lit_rlkv.tasks.rows import Table
from lit_rlkv.types import Message, PreferencePair, Problem

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Sky?"}
BLUE, GREEN = ({"role": "assistant", "content": color} for color in ("Blue.", "Green."))
SKY = (Message("user", "Sky?"),)


def line(prompt="1+1=", chosen="2", rejected="3"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_lines_become_problems_whose_solution_is_the_chosen_side(write):
    task = read_preferences(write(line(), "", line("2+2=", " 4", "5\n") | {"score": 7}))
    assert isinstance(task, FiniteTask)
    assert [task.at(index) for index in range(len(task))] == [
        Problem("1+1=", "2", "2"),
        Problem("2+2=", " 4", " 4"),
    ]
    assert task.sample(random.Random(0)) in (task.at(0), task.at(1))
    assert "rows.jsonl" in repr(task)


def test_preferences_are_not_verifiable(write):
    assert not read_preferences(write(line())).is_verifiable
    assert Recall().is_verifiable


def test_only_the_chosen_text_scores(write):
    task = read_preferences(write(line("Sky?", " It is blue.", "It is green.")))
    assert task.score(task.at(0), "It is blue.\n") == 1.0
    assert task.score(task.at(0), "It is blue") == 0.0
    assert task.score(task.at(0), "It is green.") == 0.0


def test_a_corruption_is_the_rejected_side_of_its_pair(write):
    # One prompt three times; the second pair is the first one turned around.
    task = read_preferences(write(line("?", "a", "b"), line("?", "b", "a"), line("?", "c", "a")))
    for seed in range(20):
        corruptions = [task.corrupt(task.at(index), random.Random(seed)) for index in range(3)]
        assert corruptions == ["b", "a", "a"]


def test_a_chosen_side_of_several_pairs_has_each_rejected_side(write):
    task = read_preferences(write(line("?", "a", "b"), line("?", "a", "c")))
    assert {task.corrupt(task.at(0), random.Random(seed)) for seed in range(20)} == {"b", "c"}


@pytest.mark.parametrize("prompt", ["Sky?", [ASK]])
def test_every_pair_passes_the_check_of_pairs(write, prompt):
    task = read_preferences(write(line(prompt, "Blue.", "Green.")))
    pair = preference_pair(task, task.at(0), random.Random(0))
    assert (pair.chosen, pair.rejected) == ("Blue.", "Green.")


def test_a_stream_of_problems_visits_every_pair_of_its_split(write):
    chats = [line([{"role": "user", "content": f"{n}?"}], [BLUE], [GREEN]) for n in range(40)]
    task = read_preferences(write(*chats))
    train, held_out = (PromptSource(task, split=split, seed=0) for split in ("train", "eval"))
    assert train.size + held_out.size == 40
    seen = [problem.prompt for problem in train.take(train.size) + held_out.take(held_out.size)]
    assert sorted(prompt[0].content for prompt in seen) == sorted(f"{n}?" for n in range(40))


@pytest.mark.parametrize(
    ("entry", "prompt"),
    [
        (line("Sky?", "Blue.", "Green."), "Sky?"),
        (line([ASK], [BLUE], [GREEN]), SKY),
        (line("Sky?", [BLUE], [GREEN]), "Sky?"),
        (line([ASK], "Blue.", [GREEN]), SKY),
        (line([SYSTEM, ASK], [BLUE], [GREEN]), (Message("system", "Be brief."), *SKY)),
        ({"chosen": [ASK, BLUE], "rejected": [ASK, GREEN]}, SKY),
        (line(None, [ASK, BLUE], [ASK, GREEN]), SKY),
        (line("Sky? ", [ASK, BLUE], [ASK, GREEN]), SKY),
        (line([ASK], [ASK, BLUE], [ASK, GREEN]), SKY),
        (
            {"chosen": [ASK, GREEN, ASK, BLUE], "rejected": [ASK, GREEN, ASK, GREEN]},
            (*SKY, Message("assistant", "Green."), *SKY),
        ),
    ],
)
def test_a_pair_is_text_or_chat_with_or_without_a_prompt(entry, prompt):
    assert parse_pair(entry) == PreferencePair(prompt, "Blue.", "Green.")


def role(name):
    return {"role": name, "content": "..."}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{oops", "not JSON"),
        ([1, 2], "a row must be an object, got list"),
        ({"prompt": "?"}, "missing chosen and rejected; a preference needs both sides"),
        ({"prompt": "?", "chosen": "a"}, "missing rejected"),
        ({"chosen": "a b", "rejected": "a c"}, "missing prompt; only whole conversations contain theirs"),
        ({"chosen": [BLUE], "rejected": [GREEN]}, "missing prompt"),
        (line(chosen=2), "chosen must be a text or chat messages, got 2"),
        (line(rejected=[]), r"rejected must be a text or chat messages, got \[\]"),
        (line(prompt={"role": "user", "content": "?"}), "prompt must be a text or chat messages, got {"),
        (line([{"role": "user"}]), "prompt must be a text or chat messages, got "),
        (line([{"role": "user", "content": ["?"]}]), "prompt must be a text or chat messages, got "),
        (line([role("tool"), ASK]), "the roles in prompt must be system, user, assistant, got 'tool'"),
        (line([ASK, BLUE]), "the prompt must end in a message of the user, got role 'assistant'"),
        (line([ASK], [ASK], [GREEN]), "chosen must end in a message of the assistant, got role 'user'"),
        (
            line([ASK], [BLUE], [role("system")]),
            "rejected must end in a message of the assistant, got role 'system'",
        ),
        (line([ASK], [BLUE, BLUE], [GREEN]), "must be equal before their last message"),
        (
            {"chosen": [ASK, BLUE], "rejected": [SYSTEM, ASK, GREEN]},
            "must be equal before their last message",
        ),
        (line("?", [ASK, BLUE], "Green."), "must be equal before their last message"),
        (line("Sea?", [ASK, BLUE], [ASK, GREEN]), "prompt must repeat the messages of chosen and rejected"),
        (line([SYSTEM, ASK], [ASK, BLUE], [ASK, GREEN]), "prompt must repeat the messages of chosen"),
        (line(prompt=" "), "the prompt is empty"),
        (line([{"role": "user", "content": ""}]), "the prompt is empty"),
        (line(chosen=""), "chosen is empty"),
        (line(rejected=[{"role": "assistant", "content": "\n"}]), "rejected is empty"),
        (line(rejected="2"), "both sides are equal, but a preference needs two; drop the line or fix it"),
        (line(rejected=" 2\n"), "both sides are equal"),
        ({"chosen": [ASK, BLUE], "rejected": [ASK, BLUE]}, "both sides are equal"),
    ],
)
def test_a_bad_line_is_named(write, bad, message):
    with pytest.raises(ValueError, match=f"rows.jsonl:3: .*{message}"):
        read_preferences(write(line(), "", bad, line()))


def test_no_pairs_are_refused():
    with pytest.raises(ValueError, match="'nothing' must hold rows to train on, got none"):
        Preferences(Table("nothing", [], []))


HH = ("\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Sky?\n\nAssistant: ", "Blue: a\n\ncolour.", "Green.")


def test_conversations_as_text_are_those_of_hh_rlhf():
    shared, chosen, rejected = HH
    chat = (Message("user", "Hi"), Message("assistant", "Yes?"), *SKY)
    for lead in ("", "\n\n\n"):
        crlf = shared.replace("\n", "\r\n")
        entry = {"chosen": lead + crlf + chosen, "rejected": shared.lstrip() + rejected}
        assert parse_pair(entry) == PreferencePair(chat, chosen, rejected)
    with pytest.raises(ValueError, match="must be equal before their last message"):
        parse_pair({"chosen": shared + chosen, "rejected": shared.replace("Sky", "Sea") + rejected})


def test_conversations_as_text_that_are_no_pairs_are_left_out_and_counted(write, caplog):
    shared, chosen, rejected = HH
    good = {"chosen": shared + chosen, "rejected": shared + rejected}
    bad = [
        {"chosen": shared + chosen, "rejected": shared},
        {"chosen": shared + chosen, "rejected": shared.replace("Sky", "Sea") + rejected},
        {"chosen": shared + chosen, "rejected": shared + chosen},
        {"chosen": "\n\nAssistant: Hi", "rejected": "\n\nAssistant: Ho"},
    ]
    task = read_preferences(write(good, *bad, good | {"rejected": shared + "Red."}))
    assert [task.rejected(index) for index in range(len(task))] == ["Green.", "Red."]
    assert task._table.places[1].endswith(":6")
    assert "4 of 6 rows are left out" in caplog.text
    with pytest.raises(ValueError, match="no row can be used: rejected is empty"):
        read_preferences(write(*bad))


def test_a_text_beside_a_prompt_is_no_conversation():
    text = "\n\nHuman: is a word here"
    assert parse_pair(line(chosen=text)).chosen == text


def test_a_chat_may_be_the_text_of_its_json():
    pair = parse_pair(line(json.dumps([SYSTEM, ASK]), json.dumps([BLUE]), "Green."))
    assert pair == PreferencePair((Message("system", "Be brief."), *SKY), "Blue.", "Green.")
    for text in ('[{"a": 1}]', '[{"role": "user"', "[1, 2]", "[]"):
        assert parse_pair(line(text)).prompt == text
