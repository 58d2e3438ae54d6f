"""Ranges of all numbers: of the schema, of the options' files, and of what Python calls directly."""

import math
from itertools import product
from typing import Annotated, get_args, get_origin

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lit_rlkv import CacheSpec, generate, replay_logps
from lit_rlkv.callbacks.shadow_distillation import ShadowDistillation
from lit_rlkv.checks import MAX_NUMBER, MAX_WHOLE, Range
from lit_rlkv.config import CONF_DIR, ConfigError, parse_config
from lit_rlkv.config.commands import EvaluateConfig
from lit_rlkv.config.options import check_leaves, convert
from lit_rlkv.config.schema import Config, RewardConfig
from lit_rlkv.experience.reward import RewardRule
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.objectives import corrections
from lit_rlkv.objectives.preference import check_dpo
from lit_rlkv.settings import item_of, leaf_keys
from tests.config.asking import refusal
from tests.hand_built import make_ppo, make_roles
from tests.models_zoo import tiny_model
from tests.tiers import every_nth

NAN, INF = math.nan, math.inf
NOT_FINITE = (NAN, INF, -INF)
TOO_LARGE = (10 * MAX_NUMBER, -10 * MAX_NUMBER, 10**25, 10**400)


def numbers_in(kind):
    """Return the number types that a setting or its items may have, each with its range."""
    if get_origin(kind) is Annotated and isinstance(get_args(kind)[1], Range):
        return [get_args(kind)[:2]]
    return [found for one in get_args(kind) for found in numbers_in(one)]


def numeric_keys(schema):
    return {name: kind for name, key in leaf_keys(schema) if numbers_in(kind := key.rebuild_annotation())}


def outside(kind):
    """Return numbers just outside of a range, and far outside."""
    [(number, limits)] = numbers_in(kind)
    limit = MAX_WHOLE if number is int else MAX_NUMBER
    low = limits.above if limits.least is None else limits.least - 1
    high = limits.below if limits.most is None else limits.most + 1
    assert low is not None, "every number has a lower end"
    return [low, 10 * limit if high is None else high, *TOO_LARGE]


@pytest.fixture(scope="module")
def default():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("config")


SWITCHED_OFF = "rollout.top_k"
"""A key that has one value only."""


NUMBERS = [key for key in numeric_keys(Config) if key != SWITCHED_OFF]


@pytest.mark.parametrize("key", every_nth(8, NUMBERS))
def test_every_number_of_a_run_is_refused_out_of_its_range(default, key):
    kind = numeric_keys(Config)[key]
    is_list = item_of(kind) is not None
    for value in (*NOT_FINITE, True, "12a", *outside(kind)):
        changed = default.copy()
        OmegaConf.update(changed, key, [value] if is_list else value)
        with pytest.raises(ConfigError) as caught:
            parse_config(changed)
        assert str(caught.value).startswith(key), value
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", numeric_keys(EvaluateConfig))
def test_every_number_of_an_evaluation_is_refused_out_of_its_range(key):
    kind = numeric_keys(EvaluateConfig)[key]
    is_list = item_of(kind) is not None
    for value in (*NOT_FINITE, *outside(kind)):
        with pytest.raises(ConfigError, match=f"^{key}"):
            convert(EvaluateConfig, {"ckpt": "runs/x", key: [value] if is_list else value})


@pytest.mark.parametrize("value", [*NOT_FINITE, *TOO_LARGE, "${seed}", "a${oc.env:HOME}"])
@pytest.mark.parametrize("key", ["task.n_terms", "optimizer.betas", "diagnostics.gradient.every", "seed"])
def test_a_value_that_is_not_plain_is_refused_wherever_it_stands(key, value):
    for node in ({}, {"a": 1, "b": [2, {"c": None}]}):
        check_leaves(node)
        with pytest.raises(ConfigError, match=key):
            check_leaves(node | {key: [0.9, value]})


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["reward.verifier=inf"], "reward.verifier"),
        (["reward.verifier=1e19"], "reward.verifier"),
        (["callbacks.keep_last=3000000000"], "callbacks.keep_last"),
        (["evaluation.temperature=1e-9"], "temperature"),
        (["distillation=dense_student", "distillation.weight=nan"], "distillation.weight"),
        (["distillation=anchor", "distillation.anchor_weight=-1"], "anchor_weight"),
        (["optimizer.betas=[nan,0.9]"], "optimizer.betas"),
        (["task=chain_sum_pairs", "task.slips=[1,inf]"], "task.slips"),
        (["task.n_terms=1000000000"], "n_terms"),
        (["task=countdown", "task.n_numbers=1000"], "n_numbers"),
        (["fabric.devices=1000000"], "fabric.devices"),
        (
            ["reward=endpoint", *(f"reward.functions.custom.{it}" for it in ("url=http://a", "retries=999"))],
            "retries",
        ),
        (["algorithm=ppo", "algorithm.loss.target_kl=-1"], "target_kl"),
        (["diagnostics.performance.peak_flops=0"], "peak_flops"),
        ([r"runs_dir='a\${seed}'"], "runs_dir"),
        ([r"evaluation.budgets=['\${eval:1}']"], "evaluation.budgets"),
    ],
)
def test_refusals_name_the_key(overrides, key):
    assert key in refusal(*overrides)


def test_a_range_has_both_ends():
    assert Range(above=0, below=1).holds(0.5)
    assert not any(Range(above=0, below=1).holds(value) for value in (0, 1, NAN, INF, True, "0.5", None))
    assert Range(least=1).holds(MAX_WHOLE, int)
    assert not any(Range(least=1).holds(value, int) for value in (0, MAX_WHOLE + 1, 1.0))
    assert Range(least=0, most=2**32).holds(2**32, int), "a bound of its own replaces the common one"
    assert not Range().holds(10**400)


def make_sft(**weights):
    return HydraSFT(tiny_model(), torch.optim.SGD, **weights, n_steps=1, n_warmup_steps=0)


LOG_RATIO, MASK = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
DIRECT = {
    "weight": lambda value: ShadowDistillation("dense_student", value, "policy"),
    "anchor_weight": lambda value: ShadowDistillation("dense_student", 1.0, "policy", value),
    "reward_weight": lambda value: make_sft(reward_weight=value),
    "lm_weight": lambda value: make_sft(reward_weight=1.0, lm_weight=value),
    "beta": lambda value: check_dpo(beta=value, kind="sigmoid", label_smoothing=0.0),
    "label_smoothing": lambda value: check_dpo(beta=0.1, kind="sigmoid", label_smoothing=value),
    "cap": lambda value: corrections.truncated(LOG_RATIO, MASK, cap=value),
    "low": lambda value: corrections.masked(LOG_RATIO, MASK, low=value),
    "high": lambda value: corrections.sequence_masked(LOG_RATIO, MASK, high=value),
    "veto": lambda value: corrections.sparse_rl(LOG_RATIO, MASK, veto=value),
    "verifier": lambda value: RewardRule(RewardConfig(verifier=value)),
    "clip": lambda value: RewardRule(RewardConfig(verifier=1.0, clip=value)),
}
PARTS = ("clip_low", "clip_high", "delta", "value_clip", "value_weight", "value_lr_scale", "target_kl")
PARTS += ("entropy_coef", "policy_weight")


@pytest.mark.parametrize(("name", "value"), [*product(DIRECT, NOT_FINITE)])
def test_python_refuses_a_number_that_would_drop_a_term(name, value):
    with pytest.raises(ValueError, match=name):
        DIRECT[name](value)


@pytest.mark.parametrize(("name", "value"), [*product(PARTS, NOT_FINITE)])
def test_the_constructor_of_a_loss_refuses_what_a_config_does(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        make_ppo(make_roles(needed=("policy", "value")), **{name: value})


@pytest.mark.parametrize("temperature", [*NOT_FINITE, -1.0, 1e-9, 1e9])
def test_a_temperature_is_refused_that_gives_no_distribution(temperature):
    model, options = tiny_model(), {"cache": CacheSpec.dense(), "max_new_tokens": 1, "pad_token_id": 0}
    prompt = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="temperature must be"):
        generate(model, prompt, prompt, eos_token_id=1, temperature=temperature, **options)
    rollout = generate(model, prompt, prompt, eos_token_id=1, **options)
    with pytest.raises(ValueError, match="temperature must be"):
        replay_logps(model, rollout, temperature=temperature)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"input_ids": [[3, -1]]}, "a prompt holds token -1, but LlamaForCausalLM has 64 embeddings"),
        ({"input_ids": [[-100, 3]]}, "a prompt holds token -100"),
        ({"input_ids": [[3, 64]]}, "a prompt holds token 64"),
        ({"eos_token_id": -1}, "eos_token_id must be"),
        ({"eos_token_id": [1, -5]}, "eos_token_id must be"),
        ({"pad_token_id": -1}, "pad_token_id holds token -1, but"),
        ({"pad_token_id": 64}, "of tokens 0 to 63; use the tokenizer of this model"),
    ],
)
def test_token_ids_outside_of_the_vocabulary_are_refused(given, says):
    tokens = {"input_ids": [[2, 3]], "eos_token_id": 1, "pad_token_id": 0} | given
    input_ids = torch.tensor(tokens.pop("input_ids"))
    with pytest.raises(ValueError, match=says):
        generate(
            tiny_model(),
            input_ids,
            torch.ones_like(input_ids),
            cache=CacheSpec.dense(),
            max_new_tokens=1,
            **tokens,
        )
