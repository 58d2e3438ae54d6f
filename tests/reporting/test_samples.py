"""Samples of the policy: choice, storage and display."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from lit_rlkv.experience.batch import Experience
from lit_rlkv.files import DamagedFileError
from lit_rlkv.objectives.corrections import ISWeights
from lit_rlkv.reporting.logged_samples import MAX_REPORTED, LoggedSample, read_samples, select_samples
from lit_rlkv.reporting.samples import MAX_SHOWN_CHARACTERS, Samples, draw_samples, render
from lit_rlkv.types import Problem, Record, Rewards, Rollout


def make_experience(iteration=0, n_prompts=3, group_size=2, completion="answer {row} of {iteration}"):
    n = n_prompts * group_size
    zeros, false = torch.zeros(n, 2), torch.zeros(n, 2, dtype=torch.bool)
    return Experience(
        iteration=iteration,
        problems=[
            Problem(f"question {row // group_size}", "", f"solution {row // group_size}") for row in range(n)
        ],
        completions=[completion.format(row=row, iteration=iteration) for row in range(n)],
        rollout=Rollout(zeros.long(), false, false, zeros, Record(torch.zeros(n, 1, 1, 2).int()), 0),
        rewards=Rewards(torch.arange(n) / 4, {}),
        has_eos=false.any(dim=1),
        old_logps=zeros,
        ref_logps=None,
        kl_coef=0.0,
        kl_penalty=zeros,
        values=None,
        weights=ISWeights(zeros, false),
        group_size=group_size,
    )


def make_samples(tmp_path, **options):
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    return Samples(tmp_path, console=console, **options)


def read(tmp_path):
    return [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().split("\n")[:-1]]


def shown(samples):
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(render(samples))
    return console.file.getvalue()


def test_the_first_response_to_each_of_the_first_prompts_is_drawn():
    assert draw_samples(make_experience(iteration=4), n=2) == [
        LoggedSample("question 0", "answer 0 of 4", 0.0, 5, "solution 0"),
        LoggedSample("question 1", "answer 2 of 4", 0.5, 5, "solution 1"),
    ]


def test_samples_are_drawn_every_so_many_iterations_from_the_first_on(tmp_path):
    callback = make_samples(tmp_path, every_n_iterations=3, n=1)
    for iteration in range(8):
        callback.on_rollout_end(make_experience(iteration))
    assert [row["iteration"] for row in read(tmp_path)] == [1, 4, 7]
    for n in (1, 4, 7):
        assert f"samples of iteration {n}" in callback.console.file.getvalue()
        assert f"answer 0 of {n - 1}" in callback.console.file.getvalue()


def test_the_file_holds_whole_texts_on_one_line_each(tmp_path):
    text = "é\n\u2028\x85" + "x" * 2 * MAX_SHOWN_CHARACTERS
    make_samples(tmp_path, n=1).on_rollout_end(make_experience(completion=text))
    (row,) = read(tmp_path)
    assert row["completion"] == text
    assert read_samples(tmp_path / "samples.jsonl")[0].completion == text


def test_the_report_has_samples_of_the_first_the_middle_and_the_last_draw():
    samples = [LoggedSample(f"question {row}", "", 0.0, n) for n in (1, 21, 41, 61, 81) for row in range(20)]
    chosen = select_samples(samples)
    assert list(chosen) == [1, 41, 81]
    assert [sample.prompt for sample in chosen[41]] == [f"question {row}" for row in range(MAX_REPORTED)]
    assert list(select_samples(samples[:20])) == [1]
    assert select_samples([]) == {}


def test_samples_know_the_answer_and_the_verdict_of_the_accuracy_whatever_the_reward_is():
    experience = make_experience(n_prompts=3)  # rewards 0, 0.5 and 1 for the three that are drawn
    correct, verifier = torch.tensor([1.0, 0, 0.9, 0, torch.nan, 0]), torch.tensor([0.0, 0, 1, 0, 0, 0])
    components = {"exact_match": verifier, "correct": correct}
    judged = replace(experience, rewards=replace(experience.rewards, components=components))
    samples = draw_samples(judged, n=3)
    assert [sample.is_right for sample in samples] == [False, True, False]
    assert [sample.answer for sample in samples] == ["solution 0", "solution 1", "solution 2"]
    by_function = draw_samples(judged, n=3, accuracy="correct")
    assert [sample.is_right for sample in by_function] == [True, False, None]  # the last one has no score
    assert draw_samples(experience, n=1)[0].is_right is None  # no verifier


def test_samples_of_earlier_versions_have_no_answer(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"prompt": "p", "completion": "c", "reward": 1.0, "iteration": 2}\n')
    assert read_samples(path) == [LoggedSample("p", "c", 1.0, 2, answer="", is_right=None)]


def test_the_console_shows_the_beginning_of_each_text_without_markup_or_terminal_codes():
    long = "y" * 2 * MAX_SHOWN_CHARACTERS
    text = shown([LoggedSample("[bold]", "[/nonsense] \x1b[2J", 1.0, 1), LoggedSample("p", long, 1.0, 1)])
    assert "[bold]" in text
    assert "[/nonsense] \\x1b[2J" in text
    assert "\x1b" not in text
    assert (text.count("y"), "…" in text) == (MAX_SHOWN_CHARACTERS, True)


def test_a_resumed_run_drops_the_samples_that_it_draws_again(tmp_path):
    samples = make_samples(tmp_path, every_n_iterations=1, n=1)
    for iteration in range(3):
        samples.on_rollout_end(make_experience(iteration))
    with samples.path.open("a") as file:
        file.write('{"prompt": "cut sh')
    samples = make_samples(tmp_path, every_n_iterations=1, n=1, resumed_at=2)  # the third was interrupted
    assert [row["iteration"] for row in read(tmp_path)] == [1, 2]
    samples.on_rollout_end(make_experience(2))
    assert [row["iteration"] for row in read(tmp_path)] == [1, 2, 3]


def test_damaged_samples_are_refused(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"iteration": "one"}\n')
    with pytest.raises(DamagedFileError, match="iteration of LoggedSample must be"):
        make_samples(tmp_path, every_n_iterations=1, n=1, resumed_at=2)
