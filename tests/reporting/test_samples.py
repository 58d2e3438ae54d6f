"""Samples of the policy: choice, storage and display."""

import io
import json

import pytest
import torch
from rich.console import Console

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.experience.batch import Experience
from lit_rlkv.objectives.corrections import ISWeights
from lit_rlkv.reporting.samples import (
    MAX_SHOWN_CHARACTERS,
    LoggedSample,
    Samples,
    draw_samples,
    render,
    select_samples,
)
from lit_rlkv.types import Problem, Rewards, Rollout


def make_experience(iteration=0, n_prompts=3, group_size=2, completion="answer {row} of {iteration}"):
    n = n_prompts * group_size
    zeros, false = torch.zeros(n, 2), torch.zeros(n, 2, dtype=torch.bool)
    return Experience(
        iteration=iteration,
        problems=[Problem(f"question {row // group_size}", "", "") for row in range(n)],
        completions=[completion.format(row=row, iteration=iteration) for row in range(n)],
        rollout=Rollout(zeros.long(), false, false, zeros, torch.zeros(n, 1, 1, 2).int(), 0),
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


def test_its_hooks_are_ones_that_are_called(tmp_path):
    check_hooks([make_samples(tmp_path)])


def test_the_first_response_to_each_of_the_first_prompts_is_drawn():
    assert draw_samples(make_experience(iteration=4), n=2) == [
        LoggedSample("question 0", "answer 0 of 4", 0.0, 5),
        LoggedSample("question 1", "answer 2 of 4", 0.5, 5),
    ]


def test_fewer_prompts_than_wanted_give_fewer_samples():
    assert len(draw_samples(make_experience(n_prompts=3), n=10)) == 3


def test_samples_are_drawn_every_so_many_iterations_from_the_first_on(tmp_path):
    callback = make_samples(tmp_path, every_n_iterations=3, n=1)
    for iteration in range(8):
        callback.on_rollout_end(make_experience(iteration))
    assert [sample.iteration for sample in callback.samples] == [1, 4, 7]
    assert [row["iteration"] for row in read(tmp_path)] == [1, 4, 7]


def test_the_file_holds_whole_texts_on_one_line_each(tmp_path):
    text = "é\n\u2028\x85" + "x" * 2 * MAX_SHOWN_CHARACTERS
    make_samples(tmp_path, n=1).on_rollout_end(make_experience(completion=text))
    assert read(tmp_path) == [{"prompt": "question 0", "completion": text, "reward": 0.0, "iteration": 1}]
    assert make_samples(tmp_path).samples[0].completion == text


def test_the_first_draw_and_the_latest_are_kept(tmp_path):
    callback = make_samples(tmp_path, every_n_iterations=1, n=2)
    for iteration in range(20):
        callback.on_rollout_end(make_experience(iteration))
    latest = [iteration for iteration in range(10, 21) for _ in range(2)]
    assert [sample.iteration for sample in callback.samples] == [1, 1, *latest]
    assert len(read(tmp_path)) == 40


@pytest.mark.parametrize("n", [16, 24, 30])
def test_large_draws_are_written_whole_and_share_the_report(tmp_path, n):
    callback = make_samples(tmp_path, every_n_iterations=1, n=n)
    for iteration in range(3):
        callback.on_rollout_end(make_experience(iteration, n_prompts=n))
        assert callback.latest == draw_samples(make_experience(iteration, n_prompts=n), n)
    assert [sample.iteration for sample in callback.samples] == [1] * 12 + [3] * 12
    assert len(read(tmp_path)) == 3 * n


def test_thinning_keeps_everything_that_fits():
    samples = [LoggedSample("", "", 0.0, iteration) for iteration in (1, 1, 2)]
    assert select_samples(samples, 3) == samples
    assert select_samples(samples, 2) == [samples[0], samples[2]]
    assert select_samples(samples[:2], 2) == samples[:2]
    assert select_samples([], 2) == []


def test_a_resumed_run_keeps_its_samples_and_draws_the_lost_ones_again(tmp_path):
    first = make_samples(tmp_path, every_n_iterations=1, n=1)
    for iteration in range(4):
        first.on_rollout_end(make_experience(iteration))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"prompt": "cut sh')
    again = make_samples(tmp_path, every_n_iterations=1, n=1)
    again.on_rollout_end(make_experience(2))
    assert [sample.iteration for sample in again.samples] == [1, 2, 3]
    assert [row["iteration"] for row in read(tmp_path)] == [1, 2, 3, 4, 3]


def test_a_text_is_neither_markup_nor_terminal_codes():
    text = shown([LoggedSample("[bold]", "[/nonsense] \x1b[2J", 1.0, 1)])
    assert "[bold]" in text
    assert "[/nonsense] \\x1b[2J" in text
    assert "\x1b" not in text


def test_the_console_shows_the_beginning_of_a_long_text():
    text = shown([LoggedSample("p", "y" * 2 * MAX_SHOWN_CHARACTERS, 1.0, 1)])
    assert text.count("y") == MAX_SHOWN_CHARACTERS
    assert "…" in text


def test_the_console_shows_each_draw(tmp_path):
    callback = make_samples(tmp_path, n=1)
    callback.on_rollout_end(make_experience())
    assert "samples of iteration 1" in callback.console.file.getvalue()
    assert "answer 0 of 0" in callback.console.file.getvalue()
