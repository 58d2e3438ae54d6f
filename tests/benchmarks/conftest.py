"""Benchmarks are scripts that import each other from their own folder; their tests are slow ones."""

import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.gguf_files import SPECIALS, TEMPLATE, trained_tokenizer
from tests.models_zoo import build

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))


@pytest.fixture(autouse=True)
def _own_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a record that is off and empty, as a new process has it."""
    import record

    monkeypatch.setattr(record, "is_on", False)
    monkeypatch.setattr(record, "unrecorded", [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of two layers with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIALS, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained_tokenizer(), **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=4096, **sizes
    )
    build(config).save_pretrained(folder)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow: no run of the package depends on a benchmark."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
