"""docs/reference/models.md says of a family what the code says of it."""

import re
from importlib.metadata import version

import pytest
from families import PAGE, Verdict, judge, page
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TEXT = PAGE.read_text(encoding="utf-8")


def section(title):
    return re.search(rf"^## {title}$(.*?)(?=^## |\Z)", TEXT, re.M | re.S)[1]


def row_of(title, model_type):
    return next(line for line in section(title).splitlines() if f"| `{model_type}` |" in line)


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gpt2", "gemma3_text", "lfm2", "gpt_oss", "mixtral", "deepseek_v3"]
)
def test_a_family_that_the_page_calls_exact_is(model_type):
    verdict = judge(model_type)
    assert verdict.is_exact
    # The rollout evicted what mattered, where some layer has no sliding window.
    assert (verdict.dense_gap > 100 * verdict.replay_gap) == (verdict.n_evicting > 0)
    assert verdict.name in (row := row_of("Exact", model_type))
    # with the sampler's experts, of those that have some
    assert (verdict.routing_gap is not None) == (model_type in ("gpt_oss", "mixtral", "deepseek_v3"))
    assert row.endswith("|  |") == (verdict.routing_gap is None)


@pytest.mark.parametrize("model_type", ["mamba", "falcon", "doge", "stablelm"])
def test_a_family_that_the_page_calls_refused_is_with_the_same_words(model_type):
    verdict = judge(model_type)
    assert verdict.refusal is not None
    assert verdict.refusal.replace("|", "\\|") in row_of("Refused", model_type)


def test_the_page_knows_every_causal_lm_of_transformers_once():
    listed = re.findall(r"^\| \w+ \| `(?!model_type)([^`]+)` \|", TEXT, re.M)
    assert len(listed) == len(set(listed)) > 150
    if f"transformers {version('transformers')}," in TEXT:
        assert set(listed) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert "to be fixed" not in TEXT


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v2", "jetmoe", "glm4_moe"]
)
def test_the_page_says_of_which_mixtures_of_experts_the_routing_is_replayed(model_type):
    assert re.search(r"\| \d+e-\d+ \|$", row_of("Exact", model_type))


def test_a_family_that_were_accepted_without_being_exact_would_stand_out():
    wrong = Verdict("wrong", "WrongForCausalLM", replay_gap=0.3, dense_gap=0.4)
    assert not wrong.is_exact
    assert "Accepted, but not exact: to be fixed" in page([wrong])
    assert "WrongForCausalLM" not in page([wrong]).split("to be fixed")[0]
