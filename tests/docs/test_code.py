"""The Python blocks of README and of the site run as they stand; test_how_to.py runs those of own modules."""

import shutil

import pytest
import torch

from lit_rlkv.models import prepare_backbone
from tests.chat_templates import trl_tokenizer
from tests.docs.pages import PAGES, ROOT, TRUST, code_blocks
from tests.saved_models import save_checkpoint

BLOCKS = {
    page: code_blocks(text, "python")
    for page, text in PAGES.items()
    if code_blocks(text, "python") and TRUST not in text
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds my-model and my-chat-model, whose template has tools, and the log of an engine."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(ROOT / "tests" / "data" / "samples.jsonl", folder)
    save_checkpoint(folder / "my-model", max_position_embeddings=512)
    tokenizer = trl_tokenizer("qwen3", "<|im_end|>")
    save_checkpoint(folder / "my-chat-model", "qwen3", tokenizer=tokenizer, vocab_size=len(tokenizer))
    return folder


def run_blocks(page, folder):
    """Run the blocks of a page one after the other; return their names."""
    names = {"path": folder / "my-model", "chat_path": folder / "my-chat-model"}
    for block in BLOCKS[page]:
        exec(block, names)
    return names


@pytest.mark.parametrize("page", BLOCKS)
def test_the_python_blocks_of_a_page_run(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    run_blocks(page, folder)


def test_the_example_of_readme_evicts_keys_and_replays_them(folder):
    names = run_blocks("README.md", folder)
    rollout, logps = names["rollout"], names["logps"]
    is_evicted = (rollout.evicted_at > 0) & (rollout.evicted_at < rollout.input_ids.shape[1])
    assert is_evicted.any()
    torch.testing.assert_close(logps.detach(), rollout.rollout_logps, atol=1e-4, rtol=0)


def test_the_lines_for_a_trainer_of_your_own_replay_the_rollout_and_give_a_gradient(folder):
    names = run_blocks("docs/how-to/own-trainer.md", folder)
    rollout, logps, model = names["rollout"], names["logps"], names["model"]
    assert len(rollout.input_ids) == 16
    torch.testing.assert_close(logps.detach(), rollout.rollout_logps, atol=1e-4, rtol=0)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_the_lines_that_load_an_export_give_a_model_and_its_tokenizer(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = run_blocks("docs/how-to/export.md", folder)
    assert prepare_backbone(names["model"]) is names["model"]
    assert names["tokenizer"]("2+3=").input_ids


def test_the_reward_of_the_page_on_data_prefers_a_short_right_answer(folder):
    score = run_blocks("docs/how-to/own-data.md", folder)["score"]
    assert score("5", "5") > score("the answer is 5", "5") > 0 > score("4", "5")
