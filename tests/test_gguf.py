"""A run from a GGUF file: training, evaluation, and an export that is a plain checkpoint."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlkv.config.commands import EvaluateConfig, ExportConfig
from lit_rlkv.config.options import convert
from lit_rlkv.evaluate import evaluate
from lit_rlkv.export import export
from lit_rlkv.run_files import EVALUATION
from lit_rlkv.runs.open_run import find_run, open_run
from lit_rlkv.runs.starting_model import CONVERTED_MODELS
from tests.gguf_files import write_gguf
from tests.whole_runs import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf_runs")
    write_gguf(folder / "small.gguf")
    smaller = ["rollout.max_new_tokens=10", "cache.budget=16", "cache.interval=4", "evaluation.budgets=[12]"]
    run(folder, "a", f"model.path={folder / 'small.gguf'}", "stages=[rl,eval]", *smaller, "optimizer.lr=0.01")
    return folder


@pytest.mark.slow
def test_the_run_starts_from_the_weights_of_the_file(folder):
    _, module = open_run(find_run(folder / "a"))
    (converted,) = (folder / CONVERTED_MODELS).iterdir()
    expected = AutoModelForCausalLM.from_pretrained(converted).get_input_embeddings().weight
    assert torch.equal(module.roles.backbone("policy").get_input_embeddings().weight, expected)


@pytest.mark.slow
def test_evaluation_repeats_what_the_run_found(folder):
    saved = json.loads((folder / "a" / EVALUATION).read_text())["after"]
    found = evaluate(convert(EvaluateConfig, {"ckpt": str(folder / "a")}))
    assert [(row.cache, row.accuracy, row.kl) for row in found.rows] == [
        (row["cache"], row["accuracy"], row["kl"]) for row in saved
    ]


@pytest.mark.slow
def test_the_export_is_a_plain_checkpoint(folder, tmp_path):
    to, _ = export(convert(ExportConfig, {"ckpt": str(folder / "a"), "to": str(tmp_path / "model")}))
    model = AutoModelForCausalLM.from_pretrained(to)
    tokenizer = AutoTokenizer.from_pretrained(to)
    assert getattr(model.config, "quantization_config", None) is None
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.chat_template is not None
    _, module = open_run(find_run(folder / "a"))
    trained = module.roles.backbone("policy")
    assert not torch.equal(
        model.model.layers[0].mlp.up_proj.weight, trained.model.layers[0].mlp.up_proj.base_layer.weight
    )
