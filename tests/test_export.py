"""Exports, loaded by plain transformers and peft in a process without this package."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lit_rlkv.config import ConfigError
from lit_rlkv.config.commands import ExportConfig
from lit_rlkv.config.options import convert
from lit_rlkv.evaluate import evaluate
from lit_rlkv.export import export, main
from lit_rlkv.runs.checkpoint import CheckpointDir
from lit_rlkv.runs.model_card import Exported, model_card
from lit_rlkv.runs.open_run import find_run, open_run
from lit_rlkv.stages import export as exporting
from lit_rlkv.stages.export import policy_logits, probe_tokens, widened
from lit_rlkv.trust import trusting
from tests.forks import ended
from tests.whole_runs import config, run, scoring

LOADER = """
import json, sys, torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
base, merged, tokens, out = sys.argv[1:]
input_ids = torch.tensor(json.loads(tokens))
found = {}
with torch.no_grad():
    found["merged"] = AutoModelForCausalLM.from_pretrained(merged)(input_ids).logits
    plain = AutoModelForCausalLM.from_pretrained(base)
    found["base"] = plain(input_ids).logits
    found["adapter"] = PeftModel.from_pretrained(plain, merged + "/adapter")(input_ids).logits
AutoTokenizer.from_pretrained(merged)
assert not any(name.startswith("lit_rlkv") for name in sys.modules)
save_file(found, out)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, share_sft_model):
    """Runs of two layouts that have trained away from their start, and been evaluated."""
    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder))
    far = ["optimizer.lr=0.05", "evaluation.n_prompts=4", "evaluation.n_mismatch=4", "diagnostics=none"]
    run(folder, "hydra", *far, "algorithm=ppo", "distillation=dense_student")
    run(folder, "ppo", *far, "stages=[rl]", "algorithm=ppo", "roles=ppo", "optimizer.lr=0.003")
    return folder


def asking(runs, name, to, **options):
    return convert(ExportConfig, {"ckpt": str(runs / name), "to": str(to)} | options)


def expected_logits(folder):
    """The policy's own, on the tokens that the export was compared on."""
    _, module = open_run(find_run(folder))
    input_ids = probe_tokens(module.roles.backbone("policy"))
    return input_ids, policy_logits(module.roles, input_ids)


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    folder, _ = export(asking(runs, "hydra", tmp_path_factory.mktemp("out") / "model", heads=True))
    return folder


@pytest.mark.slow
def test_plain_transformers_and_peft_compute_the_policy_in_a_process_of_their_own(runs, exported, tmp_path):
    input_ids, expected = expected_logits(runs / "hydra")
    base, out = runs / "hydra" / "backbone", tmp_path / "logits.safetensors"
    command = [sys.executable, "-c", LOADER, str(base), str(exported), str(input_ids.tolist()), str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = load_file(out)
    scale = float(expected.abs().max())
    assert float((found["merged"] - expected).abs().max()) < 1e-5 * scale
    assert float((found["adapter"] - expected).abs().max()) < 1e-5 * scale
    assert float((found["base"] - expected).abs().max()) > 1e-2 * scale


def test_the_folder_holds_weights_tokenizer_generation_config_heads_and_the_critics_adapter(exported):
    names = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    assert names >= {
        "README.md", "config.json", "export.json", "generation_config.json", "heads.safetensors",
        "model.safetensors", "tokenizer.json", "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors", "value_adapter/adapter_model.safetensors",
    }  # fmt: skip
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    assert "lora" not in "".join(load_file(exported / "model.safetensors"))
    assert load_file(exported / "heads.safetensors")["value.linear.weight"].shape == (1, 32)
    assert "lit_rlkv" not in (exported / "config.json").read_text()
    assert GenerationConfig.from_pretrained(exported).eos_token_id == 1
    assert AutoTokenizer.from_pretrained(exported).decode([2, 3]) == "01"
    policy, value = (
        load_file(exported / name / "adapter_model.safetensors") for name in ("adapter", "value_adapter")
    )
    assert policy.keys() == value.keys()
    for name in ("adapter", "value_adapter"):  # the base is a folder of this machine
        config = json.loads((exported / name / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] is None
    assert any(not torch.equal(policy[name], value[name]) for name in policy)


def test_the_card_holds_scores_config_commit_packages_and_how_to_load(runs, exported):
    card = (exported / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    saved = json.loads((runs / "hydra" / "evaluation.json").read_text())["after"]
    for row in saved:
        assert re.search(rf"\| {re.escape(row['cache'])} \| {row['accuracy']:.4g} \|", card)
    assert "budget: 7" in card
    assert f"torch {torch.__version__}" in card
    assert re.search(r"trained with (commit [0-9a-f]{40}|no commit known)", card)
    # The base of the adapter is the SFT model in the run's folder, which a stranger cannot load.
    assert "PeftModel" not in card
    assert "which is not part of this export" in card
    assert "after 2 iterations of RL:\n\n- Task: ChainSum(" in card


def test_the_cards_config_is_the_runs_and_not_that_of_the_export(runs, exported):
    card = (exported / "README.md").read_text()
    shown = OmegaConf.create(card.partition("\n```yaml\n")[2].partition("\n```\n")[0])
    assert shown == OmegaConf.load(runs / "hydra" / "config.yaml")
    assert shown.distillation.weight == 0.1
    assert shown.fabric.accelerator == "auto"


def test_the_card_of_dense_rollouts_names_no_eviction(runs):
    saved = find_run(runs / "ppo")
    exported = Exported("float32", 0.0, False, False, ())
    assert "- Cache: random 7+2" in model_card(saved, exported)
    saved.cfg.correction.samples_dense = True
    assert "- Cache: dense\n" in model_card(saved, exported)


@pytest.mark.parametrize(("text", "fence"), [("a: 1", "```"), ("a: '```b````'", "`````")])
def test_the_fence_around_the_config_is_longer_than_any_in_it(runs, text, fence):
    saved = replace(find_run(runs / "ppo"), config_yaml=f"{text}\n")
    card = model_card(saved, Exported("float32", 0.0, False, False, ()))
    assert card.endswith(f"\n\n{fence}yaml\n{text}\n{fence}\n")


def test_a_layout_that_trains_the_whole_backbone_has_no_adapter(runs, tmp_path):
    folder, found = export(asking(runs, "ppo", tmp_path / "whole"))
    assert not found.has_adapter
    assert not (folder / "adapter").exists()
    assert "no adapter: this layout" in (folder / "README.md").read_text()
    input_ids, expected = expected_logits(runs / "ppo")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder)(input_ids).logits
        base = AutoModelForCausalLM.from_pretrained(runs / "ppo" / "backbone")(input_ids).logits
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(base, expected, atol=1e-2, rtol=1e-2)


def test_weights_may_be_written_in_another_precision(runs, tmp_path):
    folder, found = export(asking(runs, "hydra", tmp_path / "small", dtype="bfloat16"))
    assert found.dtype == "bfloat16"
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert found.heads == ()
    assert not (folder / "heads.safetensors").exists()
    assert "no reward or value head" in (folder / "README.md").read_text()


def test_weights_that_overflow_are_refused(runs, tmp_path):
    copytree(runs / "ppo", tmp_path / "large")
    last = find_run(tmp_path / "large").checkpoint
    weights = {name: 1e5 * value if "norm" in name else value for name, value in last.weights().items()}
    CheckpointDir(tmp_path / "large" / "checkpoints").save(
        last.iteration + 1, weights, last.learner_state(), last.data_state, backbone=last.backbone
    )
    with pytest.raises(ConfigError, match=r"overflow in torch\.float16; use dtype=bfloat16"):
        export(asking(tmp_path, "large", tmp_path / "to", dtype="float16"))
    assert not (tmp_path / "to").exists()


def test_an_earlier_checkpoint_is_another_model(runs, exported, tmp_path):
    first = "hydra/checkpoints/iteration-000001"
    asked = asking(runs, first, tmp_path / "first")
    folder, _ = export(asked)
    first, last = (load_file(path / "model.safetensors") for path in (folder, exported))
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert "Of the run's end, 2 iterations; this is the policy after 1." in (folder / "README.md").read_text()


def losing_the_adapter(self, *args, **kwargs):
    return self.unload()


def test_a_merge_that_differs_from_the_policy_is_refused_and_leaves_no_files(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.PeftModel, "merge_and_unload", losing_the_adapter, raising=False)
    with pytest.raises(ConfigError, match="the merged model's logits must be within"):
        export(asking(runs, "hydra", tmp_path / "wrong"))
    assert list(tmp_path.iterdir()) == []


def with_a_small_adapter(runs, folder):
    """The run with a newer checkpoint, whose adapters move logits by less than rounding to bfloat16 may."""
    copytree(runs / "hydra", folder)
    last = find_run(folder).checkpoint
    small = {name: 1e-3 * value if "lora_B" in name else value for name, value in last.weights().items()}
    CheckpointDir(folder / "checkpoints").save(
        last.iteration + 1, small, last.learner_state(), last.data_state, backbone=last.backbone
    )


def test_a_merge_that_loses_a_small_adapter_is_refused_in_bfloat16_too(runs, tmp_path, monkeypatch):
    with_a_small_adapter(runs, tmp_path / "runs" / "small")
    input_ids, expected = expected_logits(tmp_path / "runs" / "small")
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(runs / "hydra" / "backbone")(input_ids).logits
    moved = float((base - expected).abs().max() / expected.abs().max())
    assert 1e-3 < moved < 1e-2  # what rounding does hides it
    asked = {"runs": tmp_path / "runs", "name": "small", "dtype": "bfloat16"}
    export(asking(to=tmp_path / "right", **asked))
    monkeypatch.setattr(exporting.PeftModel, "merge_and_unload", losing_the_adapter, raising=False)
    with pytest.raises(ConfigError, match="the merged model's logits must be within"):
        export(asking(to=tmp_path / "wrong", **asked))
    assert not (tmp_path / "wrong").exists()


def test_weights_that_are_read_back_as_others_are_refused(runs, tmp_path, monkeypatch):
    save = exporting.PreTrainedModel.save_pretrained

    def damaging(self, folder, **options):
        save(self, folder, **options)
        path = Path(folder) / "model.safetensors"
        weights = load_file(path)
        name = next(name for name in weights if "down_proj" in name)
        weights[name][0, 0] += 1
        save_file(weights, path, metadata={"format": "pt"})

    monkeypatch.setattr(exporting.PreTrainedModel, "save_pretrained", damaging)
    with pytest.raises(
        ConfigError, match=r"down_proj\.weight differs between the export and the merged model"
    ):
        export(asking(runs, "ppo", tmp_path / "wrong"))
    assert list(tmp_path.iterdir()) == []


def test_widened_weights_are_back_in_their_own_precision_bit_for_bit():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3).bfloat16(), torch.nn.BatchNorm1d(3))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert {each.dtype for each in before.values()} == {torch.bfloat16, torch.float32, torch.int64}
    with widened(model, torch.float64):
        assert {each.dtype for each in model.state_dict().values()} == {torch.float64, torch.int64}
    after = model.state_dict()
    for name, each in before.items():
        assert after[name].dtype == each.dtype
        assert torch.equal(after[name], each)


def test_an_evaluation_runs_the_reward_function_of_a_run_if_trusted_and_an_export_never(runs, tmp_path):
    folder, file, sign = tmp_path / "runs" / "own", tmp_path / "rewards.py", tmp_path / "was_run"
    copytree(runs / "ppo", folder)
    file.write_text(
        f"from pathlib import Path\nPath({str(sign)!r}).touch()\n"
        "def score(completion):\n    return float('1' in completion)\n"
    )
    saved = OmegaConf.load(folder / "config.yaml")
    python = {"_target_": "lit_rlkv.rewards.PythonFunction", "path": f"{file}:score"}
    saved.reward = OmegaConf.merge(saved.reward, {"functions": {"own": python}, "accuracy": "own"})
    OmegaConf.save(saved, folder / "config.yaml")
    export(asking(folder.parent, "own", tmp_path / "out"))
    with pytest.raises(ConfigError, match=rf"add \"trusted_modules=\['{file}'\]\" to the command line"):
        evaluate(scoring(folder))
    assert not sign.exists()
    with trusting([str(file)]):
        evaluate(scoring(folder))
    assert sign.exists()


def test_an_export_needs_no_trust_in_a_policy_that_it_does_not_use(runs, tmp_path):
    folder = tmp_path / "runs" / "own"
    copytree(runs / "ppo", folder)
    saved = OmegaConf.load(folder / "config.yaml")
    saved.cache.policy = "nowhere.Newest"
    OmegaConf.save(saved, folder / "config.yaml")
    out, _ = export(asking(folder.parent, "own", tmp_path / "out"))
    card = (out / "README.md").read_text()
    assert "nowhere.Newest" in card
    with pytest.raises(ConfigError, match="nowhere"):
        evaluate(scoring(folder))


@pytest.mark.slow
def test_a_run_of_distillation_alone_is_exported_and_scored(runs, tmp_path):
    run(runs, "distilled", "stages=[rl]", "algorithm.policy_weight=0")
    folder, _ = export(asking(runs, "distilled", tmp_path / "out"))
    input_ids, expected = expected_logits(runs / "distilled")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder)(input_ids).logits
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    assert len(evaluate(scoring(runs / "distilled")).rows) == 3


@pytest.mark.slow
def test_a_run_of_a_gpu_is_exported_and_scored_where_there_is_none(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = tmp_path / "runs" / "captured"
    copytree(runs / "ppo", folder)
    saved = OmegaConf.load(folder / "config.yaml")
    saved.rollout.cuda_graph, saved.fabric.accelerator = True, "cuda"
    saved.rollout.n_splits = 4  # of a kernel that runs on CUDA only
    OmegaConf.save(saved, folder / "config.yaml")
    written, _ = export(asking(folder.parent, "captured", tmp_path / "out"))
    assert "cuda_graph: true" in (written / "README.md").read_text()
    assert evaluate(scoring(folder)).rows == evaluate(scoring(runs / "ppo")).rows


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ckpt": "nothing"}, "is neither a run folder"),
        ({"to": ""}, "to must be a text, got ''"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16 or null, got int8"),
        ({"overwrite": "maybe"}, "overwrite must be true or false, got maybe"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_loaded(runs, tmp_path, monkeypatch, options, says):
    monkeypatch.setattr("lit_rlkv.runs.open_run.open_run", lambda run: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=says):
        export(asking(runs, "hydra", **{"to": tmp_path / "out", **options}))


def test_only_an_earlier_export_is_overwritten_and_only_when_asked(runs, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists already; give another folder, or overwrite=true"):
        export(asking(runs, "ppo", target))
    with pytest.raises(ConfigError, match=r"must be an earlier export to be replaced, found no export\.json"):
        export(asking(runs, "ppo", target, overwrite=True))
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]
    for other in ("{}", "[]", '{"files": ["thesis.txt"]}', "not JSON"):  # export.json of another program
        (target / "export.json").write_text(other)
        with pytest.raises(ConfigError, match=r"found no export\.json that lists its files"):
            export(asking(runs, "ppo", target, overwrite=True))
    assert (target / "thesis.txt").read_text() == "mine"
    rmtree(target)
    export(asking(runs, "ppo", target))
    export(asking(runs, "ppo", target, overwrite=True))
    assert json.loads((target / "export.json").read_text())["layout"] == "ppo"
    (target / "adapter").mkdir()
    (target / "adapter" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"has adapter/thesis\.txt, which no export wrote"):
        export(asking(runs, "ppo", target, overwrite=True))
    assert (target / "adapter" / "thesis.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_heads_are_refused_where_the_run_has_none(runs, tmp_path):
    copytree(runs / "hydra", runs / "grpo")
    OmegaConf.save(config(tmp_path).source, runs / "grpo" / "config.yaml")
    with pytest.raises(ConfigError, match="heads=true needs a run whose RL uses a reward or value head"):
        export(asking(runs, "grpo", tmp_path / "out", heads=True))


def test_a_value_head_is_refused_where_its_model_would_not_be_written(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"heads=true cannot be had with roles\.layout=ppo: the value head"):
        export(asking(runs, "ppo", tmp_path / "out", heads=True))
    assert not (tmp_path / "out").exists()


def test_the_command_line_says_what_it_wrote_and_what_not(runs, tmp_path):
    code, said = ended(main, f"ckpt={runs / 'ppo'}", f"to={tmp_path / 'out'}")
    assert code == 0, said
    assert "no adapter: this layout trains the whole backbone" in said
    assert "no value head written; heads=true writes it" in said
    assert (tmp_path / "out" / "model.safetensors").is_file()
