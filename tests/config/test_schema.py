"""Every key of the schema: its range, its default, and where its choices come from."""

from dataclasses import is_dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lit_rlkv.config import CONF_DIR, ConfigError, parse_config
from lit_rlkv.config.commands import EvaluateConfig, ExportConfig
from lit_rlkv.config.options import convert, default_values, keys_of
from lit_rlkv.config.schema import AlgorithmConfig, Config, FabricConfig, KLConfig, RolesConfig, RolloutConfig
from lit_rlkv.kernels.backend import KERNELS
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.models.loading import QUANTIZATIONS
from lit_rlkv.objectives.kl import ESTIMATORS
from lit_rlkv.objectives.reduction import AGGREGATIONS
from lit_rlkv.runs.context import WEIGHT_DTYPES
from tests.config.asking import refusal
from tests.tiers import every_nth


def all_keys(schema=Config, prefix=""):
    """Yield path, declaration and type of every key."""
    for name, _, declared, kind in keys_of(schema):
        if is_dataclass(kind):
            yield from all_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", declared, kind


KEYS = [*all_keys(), *all_keys(EvaluateConfig), *all_keys(ExportConfig)]
NUMBERS = [
    path
    for path, _, kind in all_keys()
    if {int, float} & {kind, *get_args(kind)} and get_origin(kind) is not tuple
]


@pytest.fixture(scope="module")
def default():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("config")


def with_value(cfg, path, value):
    changed = cfg.copy()
    OmegaConf.update(changed, path, value)
    return changed


def test_every_key_says_what_it_means():
    assert [path for path, declared, _ in KEYS if len(declared.help) < 3] == []
    assert len({path for path, _, _ in all_keys()}) > 90


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), True, "12a"])
@pytest.mark.parametrize("path", every_nth(4, NUMBERS))
def test_numbers_out_of_range_are_refused_by_name(default, path, junk):
    with pytest.raises(ConfigError) as caught:
        parse_config(with_value(default, path, junk))
    assert str(caught.value).startswith(path)
    assert " must be " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [path for path in NUMBERS if path not in ("seed", "sft.seed")])
def test_every_other_number_has_a_lower_end(default, path):
    with pytest.raises(ConfigError, match=rf"^{path} must be "):
        parse_config(with_value(default, path, -2))


def test_numbers_at_the_ends_of_a_range():
    assert convert(KLConfig, {"weight": 0}).weight == 0
    assert convert(KLConfig, {}) == KLConfig()
    for values in ({"horizon": 0}, {"weight": -1e-9}):
        with pytest.raises(ConfigError, match="must be a number"):
            convert(KLConfig, values)
    for level in (0, 1):
        with pytest.raises(ConfigError, match=f"level must be a number above 0 and below 1, got {level}"):
            convert(EvaluateConfig, {"ckpt": "a", "level": level})


def test_a_key_that_the_schema_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.n_prompt'; rollout takes n_prompts, "):
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


def test_errors_say_the_type_the_value_and_the_meaning():
    assert refusal("rollout.max_rows=0") == (
        "rollout.max_rows must be a whole number of at least 1 or null, got 0 (most responses sampled at a "
        "time, which bounds the cache; null: all)"
    )
