import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lit_rlkv.config import CONF_DIR, parse_config
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.reporting.describe import differing, run_facts
from lit_rlkv.trust import trusting


def facts_of(*overrides, environments=(), seconds=()):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=list(overrides))
    return run_facts(OmegaConf.to_container(cfg, resolve=True), environments, dict(seconds))


def test_the_default_run_is_described_by_its_config():
    assert facts_of("seed=7") == {
        "Task": "ChainSum(n_terms=5, max_operand=9)",
        "Model": "tiny_qwen3 from random weights, 3 layers, 4 KV heads, 128 wide",
        "Arm": "smd: exact replay and Shadow Mask Distillation",
        "Algorithm": "grpo, 130 iterations of 32 prompts × 8 responses",
        "Cache": "random 16+5 (budget + interval slots)",
        "Seed": "7",
    }


CASES = """
experiment=shadow -> Arm: shadow: exact replay of the evictions.
experiment=tis correction.replays=true -> Arm: shadow: exact replay of the evictions, with weights by tis.
distillation=teacher distillation.model=o/b -> Arm: shadow: exact replay of the evictions, taught by o/b.
cache.policy=dense -> Arm: dense: dense rollouts, no eviction.
cache.policy=dense -> Cache: dense.
cache.dtype=int4 cache.policy=dense experiment=shadow -> Arm: shadow: exact replay of the evictions.
cache.dtype=int4 cache.policy=dense experiment=shadow -> Cache: dense int4.
cache.dtype=int4 experiment=dense -> Cache: dense.
cache.dtype=int8 -> Cache: random 16+5 int8 (budget + interval slots).
cache.protect_prompt=true -> Cache: random prompt+16+5 (prompt + budget + interval slots).
experiment=online_dpo_smd -> Algorithm: OnlineDPO,
algorithm=cispo -> Algorithm: CISPO,
algorithm=gspo -> Algorithm: grpo with one ratio per response,
model.path=some/model -> Model: some/model.
"""
"""Overrides and the beginning of what is said of them; a full stop is the end."""
ARMS = [f"experiment={arm} -> Arm: {arm}: " for arm in ("smd", "dense", "naive", "tis", "mis", "sparse_rl")]


@pytest.mark.parametrize("case", [*CASES.strip("\n").split("\n"), *ARMS])
def test_a_run_is_described_by_what_differs_from_the_default(case):
    overrides, expected = case.split(" -> ")
    heading, text = expected.split(": ", maxsplit=1)
    assert f"{facts_of(*overrides.split())[heading]}.".startswith(text)


@pytest.mark.parametrize(
    "overrides",
    [
        "cache.policy=dense cache.dtype=int4",
        "cache.policy=h2o +cache.policy_options.value_norms=true cache.protect_prompt=true",
        "+cache.policy_options.seed=7 cache.budget_profile=pyramid cache.dtype=int8",
        "cache.budget_profile=[1,2,3]",
        "cache.policy=lit_rlkv.kvcache.policies.KeyDiff",
    ],
)
def test_a_cache_has_the_label_of_its_spec_which_tables_have(overrides):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=overrides.split())
    label, _, meaning = facts_of(*overrides.split())["Cache"].partition(" (")
    with trusting(["lit_rlkv"]):
        assert label == CacheSpec.of(parse_config(cfg).cache).label
    assert bool(meaning) is (cfg.cache.policy != "dense")


def test_a_resumed_run_tells_both_dates_and_a_gpu_its_memory():
    gpu = {"type": "cuda", "name": "H200", "memory_bytes": 139 * 2**30}
    starts = [
        {"started_at": "2026-01-31T12:00:00+00:00", "command": "/x/python -m lit_rlkv.fit a=/b/c"},
        {"started_at": "2026-02-01T08:30:00+00:00", "command": "python resume", "device": gpu},
    ]
    facts = facts_of(environments=starts, seconds=[("sft", 60.0), ("rl", 35.0)])
    assert facts["Date"] == "2026-01-31 12:00 UTC, resumed 1×, last 2026-02-01 08:30"
    assert facts["Device"] == "H200, 139 GiB"
    assert facts["Command"] == "python -m lit_rlkv.fit a=/b/c"
    assert facts["Duration"] == "1:35"


def test_only_keys_whose_values_differ_are_listed():
    one = {"seed": 0, "cache": {"budget": 16, "interval": 5}, "logger": None}
    other = {"seed": 0, "cache": {"budget": 12, "interval": 5}, "logger": {"name": "x"}}
    assert differing({"a": one, "b": other}) == [
        ["cache.budget", "16", "12"],
        ["logger", "null", "–"],
        ["logger.name", "–", "x"],
    ]


def test_what_a_config_or_an_environment_leaves_out_is_left_out_of_its_facts():
    config = {
        "task": {"n_terms": 3, "is_short": True},
        "model": {"preset": {"num_hidden_layers": 2}},
        "algorithm": {"loss": {}, "advantage": None},
        "seed": None,
    }
    starts = [{"device": {"type": "cpu", "n_threads": None, "n_cpus": None}, "command": None}]
    facts = run_facts(config, [*starts, *starts], {})
    assert facts == {
        "Task": "n_terms=3, is_short=true",
        "Model": "model from random weights, 2 layers",
        "Device": "cpu",
    }
