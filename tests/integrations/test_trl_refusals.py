"""What the TRL integration refuses."""

import copy
import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("trl")

from peft import PromptTuningConfig
from transformers import AutoModelForCausalLM, HfArgumentParser, MambaConfig, MambaForCausalLM
from trl import GRPOConfig

from lit_rlkv.integrations.trl import (
    EvictingGRPOConfig,
    EvictingGRPOTrainer,
    EvictingRLOOConfig,
    EvictingRLOOTrainer,
    release,
)
from lit_rlkv.kvcache import CacheSpec
from tests.integrations.trl_runs import build, score, tokenizer

ROOT = Path(__file__).parents[2]


def config(folder, **options):
    return EvictingGRPOConfig(
        **{"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"} | options
    )


REFUSED = [
    ("cache.policy", {"cache_policy": None}),
    ("cache policy 'snapkw'", {"cache_policy": "snapkw"}),
    ("which TRL's trainer does not train", {"cache_policy": "learned"}),
    ("snapkv", {"cache_policy": ["snapkv"]}),
    ("replay_routing", {"replay_routing": "no"}),
    ("budget must be", {"cache_budget": 0}),
    ("sink + window + 1 = 21", {"cache_budget": 20}),
    ("interval must be", {"cache_interval": 0}),
    ("sink must be", {"cache_sink": -1}),
    ("window must be", {"cache_window": 0}),
    ("correction", {"correction": "shadows"}),
    ("denominator", {"correction": "sparse_rl"}),
    ("distillation", {"distillation": "both"}),
    ("distillation_weight", {"distillation_weight": 0.0}),
    ("distillation_weight", {"distillation_weight": float("nan")}),
    ("use_vllm", {"use_vllm": True}),
    ("use_transformers_continuous_batching", {"use_transformers_continuous_batching": True}),
    ("cache_implementation", {"cache_implementation": "static"}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": float("nan")}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 1.0}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("neftune_noise_alpha", {"neftune_noise_alpha": 5}),
    ("generation_kwargs", {"generation_kwargs": {"num_beams": 2}}),
    ("temperature", {"temperature": 0.0}),
    ("max_completion_length", {"max_completion_length": None}),
]


@pytest.mark.parametrize(
    ("make", "key", "options"),
    [
        *[(EvictingGRPOConfig, *row) for row in REFUSED],
        (EvictingRLOOConfig, "correction", {"correction": "tis"}),
        (EvictingRLOOConfig, "sink + window + 1 = 21", {"cache_budget": 20}),
        (EvictingRLOOConfig, "top_p", {"top_p": 1.5}),
    ],
    ids=str,
)
def test_a_config_is_checked_when_it_is_made(tmp_path, make, key, options):
    with pytest.raises(ValueError, match=re.escape(key)) as error:
        make(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    assert "\n" not in str(error.value)


def test_the_fields_of_the_cache_reach_the_sampler(tmp_path):
    fields = {"policy": "h2o", "budget": 9, "interval": 3, "sink": 2, "window": 5}
    made = config(tmp_path, **{f"cache_{name}": value for name, value in fields.items()})
    assert made.cache_spec() == CacheSpec(**fields)


def test_the_command_line_parser_of_transformers_takes_the_fields(tmp_path):
    words = ["--output_dir", str(tmp_path), "--cache_budget", "64", "--correction", "tis"]
    parsed = HfArgumentParser(EvictingGRPOConfig).parse_args(words)
    assert (parsed.cache_budget, parsed.correction, parsed.cache_policy) == (64, "tis", "snapkv")


def tool(x: int) -> int:
    """Return x.

    Args:
        x: a number.
    """
    return x


PROMPT_TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("RLOOTrainer has none", {"arguments": {"tools": [tool]}, "trainer": EvictingRLOOTrainer}),
        (
            "environment_factory must be left out",
            {"arguments": {"environment_factory": object}, "trainer": EvictingRLOOTrainer},
        ),
        ("beside a rollout_func", {"arguments": {"rollout_func": print, "tools": [tool]}}),
        ("prompt learning", {"arguments": {"peft_config": PROMPT_TUNING}}),
        ("attn_implementation", {"model_init_kwargs": {"attn_implementation": "sdpa"}}),
        ("beta=0", {"distillation": "sparse_student"}),
        ("replay_routing|routing to replay", {"replay_routing": True}),
    ],
    ids=[
        "tools",
        "environment",
        "rollout-func-and-tools",
        "prompt-tuning",
        "attention",
        "no-teacher",
        "no-experts",
    ],
)
def test_what_a_rollout_cannot_do_is_refused_by_name(model, tmp_path, key, options):
    with pytest.raises(ValueError, match=key) as error:
        build(model, tmp_path, **options)
    assert "\n" not in str(error.value)


def test_a_model_that_cannot_be_replayed_is_refused(tmp_path):
    mamba = MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer()), hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="cannot be replayed"):
        build(mamba, tmp_path)


def test_a_config_of_trl_is_not_enough(model, tmp_path):
    plain = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(TypeError, match="args must be an EvictingGRPOConfig, got GRPOConfig"):
        EvictingGRPOTrainer(model, print, plain)
    with pytest.raises(TypeError, match="args must be an EvictingRLOOConfig, got EvictingGRPOConfig"):
        EvictingRLOOTrainer(model, print, config(tmp_path))


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [("1.15.2", True), ("1.16.0", False), ("1.16.3", False), ("1.17.0", True), ("2.0.0", True)],
)
def test_another_release_of_trl_is_refused(monkeypatch, found, is_refused):
    monkeypatch.setattr(release, "version", lambda name: found)
    with pytest.raises(ImportError, match=f"found {found}") if is_refused else nullcontext():
        release.check_trl_version()


@pytest.mark.slow
def test_the_release_is_checked_at_import_before_anything_of_trl_is_used():
    code = (
        "import importlib.metadata as metadata, sys; known = metadata.version; sys.modules['trl'] = None; "
        "metadata.version = lambda name: '1.17.0' if name == 'trl' else known(name); "
        "import lit_rlkv.integrations.trl"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("ImportError: lit_rlkv.integrations.trl must have trl")


def test_the_range_of_the_extra_is_the_one_that_is_checked():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"trl{release.SUPPORTED_TRL}" in extras["trl"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("suppress_tokens", [3]), ("bad_words_ids", [[4]]), ("min_new_tokens", 1), ("typical_p", 0.9)],
)
def test_what_the_models_generation_config_asks_of_rollouts_is_refused_by_name(tmp_path, model, name, value):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    setattr(loaded.generation_config, name, value)
    with pytest.raises(ValueError, match=f"generation_config sets {name}=.*generation_config.{name} = None"):
        build(loaded, tmp_path)
    setattr(loaded.generation_config, name, None)
    build(loaded, tmp_path)


@pytest.mark.parametrize("trainer", [EvictingGRPOTrainer, EvictingRLOOTrainer])
def test_arguments_may_be_positional_and_the_config_stays_as_it_was(tmp_path, model, trainer):
    named = build(model, tmp_path, trainer=trainer)
    args = copy.deepcopy(named.args)
    args.model_init_kwargs = {"dtype": "float32"}
    found = trainer(model, score, args, named.train_dataset, None, tokenizer())
    assert found.train_dataset is named.train_dataset
    assert found.processing_class is not None
    assert args.model_init_kwargs == {"dtype": "float32"}


def test_a_cache_is_refused_by_the_names_of_the_configs_fields(tmp_path):
    with pytest.raises(ValueError, match=r"^cache_dtype must be one of int8, fp8, int4 or null, got 'int3'"):
        EvictingGRPOConfig(str(tmp_path), cache_dtype="int3").check()
