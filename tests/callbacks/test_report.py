"""report.html: what it says, and that it needs nothing else."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from lit_rlkv.callbacks import report as report_module
from lit_rlkv.callbacks.report import RunReport, figures, headline, render, write_report
from lit_rlkv.callbacks.samples import Sample
from lit_rlkv.data.reward_evaluation import RewardReport
from lit_rlkv.types import NEVER, EvalRow, Rollout

EMPTY = RunReport("a run", "", [], [], [], None, None, None, {}, [], {})
VOID = {"meta", "img", "br"}


def eval_row(cache, budget, accuracy):
    return EvalRow(cache, budget, accuracy, 128, 10.0, 2048, 0.1, 1e-6)


def make_rollout():
    """Two rows of six columns; the second has one token of padding, and evicts a key."""
    is_token = torch.ones(2, 6, dtype=torch.bool)
    is_token[1, 0] = False
    is_action = torch.arange(6).expand(2, 6) >= 3
    death = torch.full((2, 1, 2, 6), NEVER).int()
    death[1, 0, 1, 2] = 4
    death[1, ..., 0] = 0
    token_ids = torch.arange(12).view(2, 6)
    return Rollout(token_ids, is_token, is_action, torch.zeros(2, 6), death, 2048)


FULL = RunReport(
    title="a <run> & more",
    config_yaml="task:\n  name: <script>alert(1)</script>\n",
    history=[
        {"iteration": 1, "reward": 0.25, "rollout_corr/kl": 0.1},
        {"iteration": 2, "reward": 0.75, "rollout_corr/kl": 0.05},
    ],
    before=[eval_row("dense", None, 0.99), eval_row("random 16+4", 16, 0.456)],
    after=[eval_row("dense", None, 0.98), eval_row("random 16+4", 16, 0.81)],
    rollout=make_rollout(),
    budget=16,
    interval=4,
    stage_seconds={"sft": 90.0, "rl": 5.0},
    samples=[Sample("1 < 2 & 3", "<img src=x onerror=y>", 0.5, 7)],
    versions={"torch": "2.13.0", "<b>": "1"},
)


class Balance(HTMLParser):
    """Collects tags and links, and whether tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], [], []
        self.is_balanced = True

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.is_balanced &= self.open.pop() == tag


def parsed(page):
    parser = Balance()
    parser.feed(page)
    return parser


@pytest.fixture(scope="module")
def full_page():
    return render(FULL)


def test_the_headline_is_the_gain_under_the_budget():
    assert headline(FULL) == [
        "Accuracy under a budget of 16 keys: 0.46 → 0.81; dense: 0.99 → 0.98.",
        "Mean reward of the rollouts over 2 iterations: 0.25 → 0.75.",
    ]


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"before": [], "history": []}, ["Accuracy under a budget of 16 keys: 0.81; dense: 0.98."]),
        ({"budget": None, "history": []}, ["Accuracy with a dense cache: 0.99 → 0.98."]),
        ({"before": [], "after": [], "history": []}, ["This run neither trained nor evaluated a policy."]),
        (
            {"before": [], "after": [], "history": [{"iteration": 1, "reward": 0.5}]},
            ["Mean reward of the rollouts in one iteration: 0.50."],
        ),
        (
            {"before": [], "after": [eval_row("random 8+4", 8, 0.1)], "history": []},
            ["The run's own cache was not evaluated."],
        ),
    ],
)
def test_the_headline_tells_only_what_was_measured(changes, sentences):
    assert headline(replace(FULL, **changes)) == sentences


def test_the_page_needs_nothing_from_outside(full_page):
    parser = parsed(full_page)
    assert parser.is_balanced
    assert parser.open == []
    assert not re.search(r"https?://", full_page)
    assert not {"script", "link", "iframe", "object"} & set(parser.tags)
    assert "@import" not in full_page
    assert "url(" not in full_page
    assert len(parser.links) == 6
    assert all(link.startswith("data:image/png;base64,") for link in parser.links)


def test_texts_of_a_run_are_no_html(full_page):
    assert "script" not in parsed(full_page).tags
    assert "<title>a &lt;run&gt; &amp; more</title>" in full_page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in full_page
    assert "1 &lt; 2 &amp; 3" in full_page
    assert "&lt;img src=x onerror=y&gt;" in full_page
    assert "&lt;b&gt; 1" in full_page


def test_the_check_for_html_would_notice_an_unescaped_text(monkeypatch):
    monkeypatch.setattr(report_module, "escape", lambda text: text)
    bare = replace(FULL, history=[], before=[], after=[], rollout=None, stage_seconds={}, title="a run")
    assert "script" in parsed(render(bare)).tags


def test_the_page_shows_every_part(full_page):
    for part in (
        "Evaluation",
        "Pictures",
        "Samples",
        "Time",
        "Config",
        "0.456",
        "random 16+4",
        "torch 2.13.0",
    ):
        assert part in full_page
    assert "prefers-color-scheme: dark" in full_page
    assert full_page.count("<figcaption>") == 6


def test_a_learned_reward_stands_beside_the_accuracy():
    rows = [replace(row, learned_reward=value) for row, value in zip(FULL.after, (1.25, -0.5), strict=True)]
    page = render(replace(FULL, before=[], after=rows))
    assert "Learned reward after" in page
    assert "1.25" in page
    assert "-0.50" in page
    assert "Learned reward" not in render(FULL)


def test_a_run_that_did_nothing_has_a_page_without_empty_sections():
    page = render(EMPTY)
    parser = parsed(page)
    assert not {"h2", "table", "figure", "details", "footer"} & set(parser.tags)
    assert "neither trained nor evaluated" in page


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"history": []}, ["Accuracy against budget", "Cache fill", "Key lifetimes in one sequence"]),
        ({"rollout": None, "before": [], "after": []}, ["Reward", "Mismatch of sampler and learner"]),
        ({"rollout": None, "history": [{"iteration": 1, "loss": 0.5}]}, ["Accuracy against budget"]),
        (
            {
                "rollout": None,
                "before": [],
                "after": [],
                "history": [{"iteration": 1, "rewards/learned": 0.5}],
                "reward_model": RewardReport(10, 0.9, 1.5, 0.5, 0.05, [0.2, 0.8], [0.1, 0.9], [10, 10]),
            },
            ["Proxy and gold", "How sure the reward model should be"],
        ),
    ],
)
def test_there_is_a_figure_for_what_has_data(changes, names):
    assert [name for _, name, _ in figures(replace(FULL, **changes))] == names


def test_lifetimes_are_those_of_the_longest_sequence_with_its_tokens():
    labels = {token: f"t{token}" for token in range(5)}
    figure = figures(replace(FULL, token_labels=labels))[-1][0]
    texts = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    # the first row has six tokens, the second five; the last token has no key
    assert texts == ["t0", "t1", "t2", "t3", "t4"]


def test_a_dense_run_has_no_budget_to_mark():
    dense = replace(FULL, budget=None, interval=None)
    figure = next(figure for figure, name, _ in figures(dense) if name == "Cache fill")
    assert not [line for line in figure.axes[0].lines if "budget" in str(line.get_label())]


def test_a_report_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, EMPTY)
    assert path.read_text(encoding="utf-8") == render(EMPTY)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    broken = replace(EMPTY, after=[FULL.after[0], FULL.after[0]])
    with pytest.raises(ValueError, match="lists a cache twice"):
        write_report(path, broken)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
