from pathlib import Path

import pytest
import record
import torch
import waiting

from lit_rlkv import prepare_backbone
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.models.presets import tiny_qwen3

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "turns-and-long-prompts.md"


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "head_dim": 4, "num_hidden_layers": 1, "intermediate_size": 16}
    return prepare_backbone(tiny_qwen3(len(build_task_tokenizer()), 0, 1, **sizes).eval())


def test_one_response_stands_still_for_as_long_as_its_environment_sleeps(model, monkeypatch):
    monkeypatch.setattr(waiting, "N_ROWS", 1)
    monkeypatch.setattr(waiting, "MAX_TURNS", 2)
    slow = waiting.measure(model, (0.1, 0.1), 1, 0)
    n_answers = slow["turns_per_response"]
    assert 0.09 * n_answers < slow["waiting_s"] < slow["seconds"] - slow["forward_s"]
    at_once = waiting.measure(model, waiting.AT_ONCE, 1, 0)
    assert at_once["waiting_s"] < slow["waiting_s"]
    assert at_once["n_forwards"] == slow["n_forwards"] > 10


def test_the_page_shows_what_the_last_run_measured():
    assert waiting.table(record.rows(waiting.NAME)) in PAGE.read_text(encoding="utf-8")
