"""Every key of the schema: its range, its default, and where its choices come from."""

from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lit_rlkv.config import CONF_DIR, ConfigError, parse_config
from lit_rlkv.config.commands import EvaluateConfig, ExportConfig
from lit_rlkv.config.options import convert, default_values
from lit_rlkv.config.schema import AlgorithmConfig, Config, FabricConfig, KLConfig, RolesConfig, RolloutConfig
from lit_rlkv.kernels.backend import KERNELS
from lit_rlkv.kernels.shadow_attention import METHODS
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.models.loading import QUANTIZATIONS
from lit_rlkv.objectives.kl import ESTIMATORS
from lit_rlkv.objectives.reduction import AGGREGATIONS
from lit_rlkv.runs.launch import WEIGHT_DTYPES
from lit_rlkv.settings import leaf_keys


@pytest.fixture(scope="module")
def default():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("config")


def with_value(cfg, path, value):
    changed = cfg.copy()
    OmegaConf.update(changed, path, value)
    return changed


def test_every_key_says_what_it_means():
    keys = [found for schema in (Config, EvaluateConfig, ExportConfig) for found in leaf_keys(schema)]
    assert len(keys) > 90
    assert [name for name, key in keys if len(key.description) < 3] == []


def test_a_key_that_the_schema_lacks_is_refused():
    with pytest.raises(
        ConfigError, match=r"unknown key 'rollout\.n_prompt'; rollout takes .*; did you mean n_prompts"
    ):
        convert(RolloutConfig, {"n_prompt": 3}, "rollout")


def test_the_composed_config_has_the_defaults_of_the_schema(default):
    expected = default_values(Config)
    for name in ("rollout", "cache", "sft", "evaluation", "fabric", "callbacks"):
        found = OmegaConf.to_container(default[name])
        assert found == expected[name]
    parsed = parse_config(default)
    assert parsed.rollout == RolloutConfig()
    assert parsed.sft.reward_steps == parsed.sft.n_steps
    assert parse_config(with_value(default, "seed", 7)).sft.seed == 7


@pytest.mark.parametrize(
    ("schema", "name", "registry"),
    [
        (Config, "kernels", KERNELS),
        (RolesConfig, "layout", LAYOUTS),
        (RolesConfig, "shadow_attention", METHODS),
        (AlgorithmConfig, "aggregation", AGGREGATIONS),
        (KLConfig, "estimator", ESTIMATORS),
        (FabricConfig, "precision", WEIGHT_DTYPES),
        (FabricConfig, "quantization", QUANTIZATIONS),
    ],
)
def test_choices_are_those_of_the_code_that_takes_them(schema, name, registry):
    kind = get_type_hints(schema)[name]
    kinds = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    assert {*get_args(kinds[0])} == {*registry}
