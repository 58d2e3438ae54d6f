"""python -m lit_rlkv.plan: sizes of public models, what a budget buys, and refusals before any work."""

import json
import shlex
from contextlib import suppress
from types import SimpleNamespace

import pytest
from transformers import BertConfig, Gemma3Config, Qwen3Config

from lit_rlkv import plan
from lit_rlkv.cli import compose_arguments
from lit_rlkv.config import CONF_DIR, ConfigError
from lit_rlkv.planning.cards import CARDS, GIB, find_card
from tests import models_zoo

QWEN3_4B = Qwen3Config(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A folder with a config and no weights."""
    folder = tmp_path_factory.mktemp("qwen3-4b")
    QWEN3_4B.save_pretrained(folder)
    return str(folder)


def planned(capsys, *arguments):
    with suppress(SystemExit):  # it does not fit
        plan.plan(plan.parse([*arguments, "--json"]))
    return json.loads(capsys.readouterr().out)


def by_budget(found):
    return {row["budget"]: row for row in found["rows"]}


LONG = (
    "recipe=llm",
    "rollout.max_new_tokens=16384",
    "cache.policy=h2o",
    "cache.budget=1024",
    "cache.interval=128",
)


def test_a_budget_lets_a_card_decode_what_it_cannot_hold_whole(capsys, qwen):
    found = planned(capsys, *LONG, f"model.path={qwen}", "gpu=24GB")
    rows = by_budget(found)
    assert [*rows] == [None, 2048, 1024, 512]
    assert not rows[None]["fits"]
    assert [rows[budget]["rows"] for budget in (2048, 1024, 512)] == sorted(
        row["rows"] for row in rows.values()
    )[1:]
    # By hand: 2 · 36 layers · 8 heads · 128 dimensions · 2 bytes a key, 1,152 of them.
    of_row = 2 * 36 * 8 * 128 * 2 * 1152
    assert rows[1024]["rollout_bytes"]["KV cache"] == rows[1024]["rows"] * of_row
    assert rows[1024]["rollout_bytes"]["weights"] == pytest.approx(2 * 4.022e9 + 4 * 66e6, rel=0.01)
    assert sum(rows[1024]["rollout_bytes"].values()) <= found["usable"]
    assert rows[1024]["rollout_s"] > rows[512]["rollout_s"]
    more = planned(capsys, *LONG, f"model.path={qwen}", "gpu=H100")
    assert by_budget(more)[None]["fits"]
    assert more["longest_sequence"] > 3 * found["longest_sequence"]


def test_greedy_responses_of_remax_take_time_and_no_memory_of_the_card(capsys, qwen):
    options = (*LONG, f"model.path={qwen}", "gpu=24GB", "algorithm.group_size=1")
    remax, plain = (
        by_budget(planned(capsys, *options, f"algorithm={name}"))[1024]
        for name in ("remax", "reinforce++_plain")
    )
    assert remax["rollout_s"] == pytest.approx(2 * plain["rollout_s"], rel=0.01)
    for name in ("rows", "update_s", "rollout_bytes"):
        assert remax[name] == plain[name], name


def test_the_largest_budgets_are_those_that_still_fit(capsys, tmp_path):
    """Two layers of 4B, on a card that is small for them."""
    Qwen3Config(**{**QWEN3_4B.to_dict(), "num_hidden_layers": 2, "layer_types": None}).save_pretrained(
        tmp_path
    )
    asked = [*LONG, f"model.path={tmp_path}", "gpu=5GB"]
    found = planned(capsys, *asked)
    chosen, most = by_budget(found)[1024]["rows"], found["most_keys"]
    assert [*map(int, most)] == [chosen // 16 * 8, chosen]  # twice as many have no room for their records
    assert [*most.values()] == sorted(most.values(), reverse=True)
    assert most[str(chosen)] >= 1024

    def n_rows(budget):
        return by_budget(planned(capsys, *asked, f"cache.budget={budget}"))[budget]["rows"]

    assert n_rows(most[str(chosen)]) == chosen
    assert n_rows(most[str(chosen)] + 1) < chosen
    with suppress(SystemExit):
        plan.plan(plan.parse(asked))
    assert f"{most[str(chosen)]:,} with {chosen} rows at a time" in capsys.readouterr().out


def test_a_budget_buys_nothing_for_short_responses(capsys, qwen):
    short = (
        "recipe=llm",
        "rollout.max_new_tokens=512",
        "cache.budget=1024",
        "cache.interval=128",
        "prompt=256",
    )
    rows = by_budget(planned(capsys, *short, f"model.path={qwen}", "gpu=H100"))
    assert rows[None]["rows"] == rows[1024]["rows"]
    assert rows[None]["rollout_s"] == pytest.approx(rows[1024]["rollout_s"], rel=0.1)


def test_what_cannot_fit_ends_with_1_and_says_what_helps(capsys, qwen):
    asked = plan.parse([*LONG, f"model.path={qwen}", "gpu=10GB"])
    with pytest.raises(SystemExit) as end:
        plan.plan(asked)
    said = capsys.readouterr().out
    assert end.value.code == 1
    assert "it does not fit" in said
    assert "fabric.quantization=4bit: it fits: " in said


def test_what_helps_is_a_setting_for_programs(capsys, qwen):
    asked = (*LONG, f"model.path={qwen}", "gpu=24GB")
    found = planned(capsys, *asked)
    assert "cache.dtype=int4" in [change["override"] for change in found["changes"]]
    for change in found["changes"]:
        other = planned(capsys, *asked, change["override"])
        row = next(row for row in other["rows"] if row["is_chosen"])
        assert (change["rows"], change["fits"]) == (row["rows"], row["fits"])
        assert change["longest_sequence"] == other["longest_sequence"]


def test_a_teacher_takes_its_weights_from_the_card(capsys, qwen):
    asked = ("recipe=llm", f"model.path={qwen}", "gpu=H100")
    alone = planned(capsys, *asked)["usable"]
    teacher = ("distillation=teacher", f"distillation.model={qwen}", "distillation.dtype=bfloat16")
    assert alone - planned(capsys, *asked, *teacher)["usable"] == pytest.approx(2 * 4.02e9 * 0.94, rel=0.01)


def test_a_tower_for_images_takes_memory_and_no_time_or_moments(capsys, tmp_path):
    sizes = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 32_000}
    config = Gemma3Config(text_config={**sizes, "num_attention_heads": 4, "num_key_value_heads": 1})
    config.save_pretrained(tmp_path / "whole")
    config.text_config.save_pretrained(tmp_path / "text")
    whole, text = (planned(capsys, f"model.path={tmp_path / n}", "gpu=24GB") for n in ("whole", "text"))
    (ours,), (other,) = ([row for row in each["rows"] if row["is_chosen"]] for each in (whole, text))
    assert (ours["rollout_s"], ours["update_s"]) == (other["rollout_s"], other["update_s"])
    assert ours["update_bytes"]["optimizer"] == other["update_bytes"]["optimizer"]
    assert ours["update_bytes"]["weights"] > 2 * other["update_bytes"]["weights"]


@pytest.fixture
def small(tmp_path):
    """A folder with the config of a model that fits everywhere."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    Qwen3Config(**sizes, **heads).save_pretrained(tmp_path / "small")
    return f"model.path={tmp_path / 'small'}"


def test_a_recipe_of_a_plan_composes_to_the_same_config_by_the_command_that_it_prints(
    capsys, small, tmp_path, monkeypatch
):
    """A recipe on another one of the user's own; then the one in the place of the shipped ones."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my conf" / "recipe"
    folder.mkdir(parents=True)
    (folder / "first.yaml").write_text("# @package _global_\nseed: 9")
    own = ["--config-dir", "my conf", "recipe=first", small, "task=sorting", "rollout.max_rows=8"]
    plan.plan(plan.parse([*own, "gpu=24GB", f"to={folder / 'mine.yaml'}"]))
    said = capsys.readouterr()
    printed = [one.split(".fit ")[1] for one in (said.out.splitlines()[-1], said.err.splitlines()[-1])]
    assert shlex.split(printed[1]) == ["--config-dir", str(tmp_path / "my conf"), "recipe=mine"]
    first, second, third = (
        compose_arguments("config", each)[0] for each in (own, *map(shlex.split, printed))
    )
    assert first == second == third
    assert (third.seed, third.rollout.max_rows) == (9, 8)


def test_a_recipe_elsewhere_says_where_it_is_found(capsys, small, tmp_path):
    plan.plan(plan.parse([small, "gpu=24GB", f"to={tmp_path / 'mine.yaml'}"]))
    said = capsys.readouterr().err
    assert "move it to a folder DIR/recipe" in said
    assert "fit --config-dir DIR recipe=mine" in said
    assert plan._use_of(CONF_DIR / "recipe" / "x.yaml").endswith("lit_rlkv.fit recipe=x")
    assert plan._use_of(CONF_DIR / "task" / "x.yaml").endswith("--config-dir DIR recipe=x")


def test_a_config_that_does_not_fit_leaves_no_recipe_and_says_so(qwen, tmp_path):
    file = tmp_path / "mine.yaml"
    with pytest.raises(SystemExit, match=r"mine\.yaml is not written: the config does not fit"):
        plan.plan(plan.parse([*LONG, f"model.path={qwen}", "gpu=10GB", f"to={file}"]))
    assert not file.exists()


def test_a_command_has_each_setting_once(capsys, qwen):
    plan.plan(
        plan.parse([*LONG, f"model.path={qwen}", "gpu=24GB", "rollout.max_rows=216", "cache.budget=272"])
    )
    words = capsys.readouterr().out.split()
    (n_rows,) = [word for word in words if word.startswith("rollout.max_rows=")]
    assert n_rows != "rollout.max_rows=216"


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("gpu=H900", "gpu=H900 is no card known here and no size up to 512 GB; give one of RTX3090"),
        ("gpu=0GB", "is no card"),
        ("gpu=9090", "is no card"),
        ("gpu=1e30GB", "is no card"),
        ("prompt=-3", "prompt must be the tokens of a prompt, got -3"),
        ("prompt=x", "prompt must be"),
        ("to=nowhere/mine.yaml", "must be a new file NAME.yaml in a folder that exists"),
        ("gpus=24GB", "unknown key 'gpus': did you mean 'gpu'?"),
        (
            "rollout.n_prompts=1000000000",
            "of host memory, more than any machine has; lower it",
        ),
        ("cache.budgett=3", "did you mean 'cache.budget'"),
        ("cache.budget=0", "cache.budget must be"),
        ("model.path=./nothing", "is not a checkpoint folder"),
        ("cache.budget=20", "cache: budget must be at least sink + window + 1 = 21, got 20"),
        ("rollout.replay_routing=true", "has no experts to record"),
        ("rollout.max_new_tokens=1000000", "for 32768; lower rollout.max_new_tokens=1000000 or prompt="),
    ],
)
def test_wrong_input_is_refused_as_by_fit(argument, says, qwen):
    with pytest.raises(ConfigError) as error:
        plan.plan(plan.parse([*LONG, f"model.path={qwen}", "gpu=24GB", argument]))
    assert says in str(error.value)


def test_heads_that_no_number_of_kv_heads_shares_are_refused(tmp_path):
    Qwen3Config(num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=7).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model: 32 heads are no multiple of 7 KV heads"):
        plan.plan(plan.parse(["recipe=llm", f"model.path={tmp_path}", "gpu=24GB"]))


def test_a_config_of_an_unknown_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "zebra9"}')
    with pytest.raises(ConfigError, match=r"model\.path=.*zebra9"):
        plan.plan(plan.parse(["recipe=llm", f"model.path={tmp_path}", "gpu=24GB"]))


@pytest.mark.parametrize("name", ["h100", "NVIDIA H100", "H100 80GB", "24GB", "24 GiB", "24", "4090"])
def test_cards_are_found_by_name_and_by_size(name):
    card = find_card(name)
    assert 0.8 * card.memory < card.usable < card.memory
    assert card.memory == CARDS["H100"].memory if "100" in name else 23 * GIB < card.memory < 24 * GIB


def test_a_size_has_the_speed_of_the_nearest_card():
    assert find_card("80GB").bandwidth in (CARDS["H100"].bandwidth, CARDS["A100"].bandwidth)
    assert find_card(None).usable > 0


@pytest.mark.parametrize(
    ("name", "gib", "like"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA L40", 44.5, None),
    ],
)
def test_a_card_of_this_machine_has_its_own_speed_or_none(monkeypatch, name, gib, like):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    properties = SimpleNamespace(total_memory=int(gib * GIB))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: properties)
    found = find_card(None)
    assert found.name == name
    assert found.bandwidth == (None if like is None else CARDS[like].bandwidth)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral", "gemma3", "gpt2"])
def test_families_are_planned_from_their_config(capsys, family, tmp_path):
    models_zoo.tiny_model(family).config.save_pretrained(tmp_path)
    found = planned(
        capsys, "recipe=llm", f"model.path={tmp_path}", "gpu=H100", "prompt=8", "rollout.max_new_tokens=16"
    )
    assert all(row["fits"] for row in found["rows"])
    assert found["rows"][0]["update_bytes"]["kept"] > 0


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    BertConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a forward of BertLMHeadModel cannot be followed"):
        plan.plan(plan.parse(["recipe=llm", f"model.path={tmp_path}", "gpu=24GB"]))
