"""What the TRL integration refuses, and with which words."""

import copy
import re
import subprocess
import sys
import tomllib
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
from tests.integrations.trl_runs import build, save_model, score, tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def config(folder, **options):
    return EvictingGRPOConfig(
        **{"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"} | options
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_policy": "snapkw"}, "unknown cache policy 'snapkw'; choose one of dense, streaming"),
        ({"cache_policy": None}, "cache.policy must be one of dense, streaming, "),
        ({"cache_policy": ["snapkv"]}, "or a policy of your own, got ['snapkv']; choose one"),
        ({"replay_routing": "no"}, "replay_routing must be True or False, got 'no'"),
        ({"cache_budget": 0}, "cache.budget must be at least 1, got 0"),
        ({"cache_budget": 20}, "budget must be at least sink + window + 1 = 21, got 20"),
        ({"cache_interval": 0}, "cache.interval must be at least 1, got 0"),
        ({"cache_sink": -1}, "cache.sink must be at least 0, got -1"),
        ({"cache_window": 0}, "cache.window must be at least 1, got 0"),
        ({"correction": "shadows"}, "correction must be one of shadow, naive, tis, mis, got 'shadows'"),
        ({"correction": "sparse_rl"}, "counts fewer tokens in the loss's denominator"),
        ({"distillation": "both"}, "distillation must be one of none, dense_student, sparse_student"),
        ({"distillation_weight": 0.0}, "distillation_weight must be a number above 0, got 0.0"),
        ({"distillation_weight": float("nan")}, "distillation_weight must be a number above 0, got nan"),
        ({"use_vllm": True}, "use_vllm must be False, got True: vLLM does not record evictions"),
        ({"use_transformers_continuous_batching": True}, "a paged cache does not record evictions"),
        ({"cache_implementation": "static"}, "the cache is the one of cache_policy and cache_budget"),
        ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1, got 0.0; 1 keeps all tokens"),
        ({"top_p": float("nan")}, "top_p must be a number above 0 and at most 1, got nan"),
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1; 0 keeps all tokens"),
        ({"min_p": 1.0}, "min_p must be a number of at least 0 and below 1, got 1.0; 0 keeps all tokens"),
        (
            {"repetition_penalty": 1.1},
            "repetition_penalty must be 1.0, got 1.1: the learner's log-probs have no penalty; leave it out",
        ),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha must be None"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs must be None"),
        ({"temperature": 0.0}, "temperature must be a number of at least 1e-06 and at most 1000000, got 0.0"),
        (
            {"max_completion_length": None},
            "max_completion_length must be a whole number of",
        ),
    ],
    ids=str,
)
def test_a_config_is_checked_when_it_is_made(tmp_path, options, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        config(tmp_path, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"correction": "tis"}, "correction must be one of shadow, naive, got 'tis'; choose one"),
        ({"cache_budget": 20}, "budget must be at least sink + window + 1 = 21, got 20"),
        ({"use_vllm": True}, "use_vllm must be False, got True: vLLM does not record evictions"),
        ({"top_p": 1.5}, "top_p must be a number above 0 and at most 1, got 1.5"),
        ({"repetition_penalty": 1.1}, "the learner's log-probs have no penalty"),
        ({"temperature": 0.0}, "temperature must be"),
    ],
    ids=str,
)
def test_the_config_of_rloo_is_checked_too(tmp_path, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        EvictingRLOOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"tools": [tool]},
            "tools must be left out of EvictingGRPOTrainer: a tool's answer enters the context",
        ),
        ({"environment_factory": object}, "environment_factory must be left out"),
        ({"rollout_func": print}, "rollout_func must be left out"),
        (
            {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
            "prompt learning adds virtual tokens",
        ),
    ],
    ids=["tools", "environment", "rollout_func", "prompt-tuning"],
)
def test_what_a_rollout_cannot_do_is_refused_with_the_reason(model, tmp_path, arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        build(model, tmp_path, arguments=arguments)
    assert "\n" not in str(error.value)


def test_another_attention_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="must leave attn_implementation out, got 'sdpa'"):
        build(model, tmp_path, model_init_kwargs={"attn_implementation": "sdpa"})


def test_sparse_student_needs_a_reference(model, tmp_path):
    with pytest.raises(ValueError, match="needs a frozen teacher, and TRL keeps no reference at beta=0"):
        build(model, tmp_path, distillation="sparse_student")


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


def words_for(found):
    return f"lit_rlkv.integrations.trl must have trl>=1.16,<1.17, found {found}; run: pip install -e '.[trl]'"


@pytest.mark.parametrize("found", ["1.15.2", "1.17.0", "2.0.0"])
def test_another_release_of_trl_is_refused(monkeypatch, found):
    monkeypatch.setattr(release, "version", lambda name: found)
    with pytest.raises(ImportError) as error:
        release.check_trl_version()
    assert str(error.value) == words_for(found)


@pytest.mark.parametrize("found", ["1.16.0", "1.16.3"])
def test_releases_in_the_range_pass(monkeypatch, found):
    monkeypatch.setattr(release, "version", lambda name: found)
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
    assert done.stderr.splitlines()[-1] == f"ImportError: {words_for('1.17.0')}"


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
