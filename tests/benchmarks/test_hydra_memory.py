from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hydra_memory import measure, row_of
from hydra_parts.measure import Held, Phase, check_backbones, largest_fitting, measure_held, n_backbones
from hydra_parts.plot import draw, parts_at_peak
from hydra_parts.runs import make_roles, make_run
from hydra_parts.setting import PAD, PRESETS, Setting, make_tokenizer
from hydra_parts.tables import Result
from hydra_parts.timing import Seconds

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.layouts import LAYOUTS

SETTING = Setting(
    PRESETS["tiny"],
    prompt_len=8,
    response_len=24,
    rank=4,
    cache=CacheSpec("random", budget=12, interval=4, sink=1, window=3),
)


@pytest.mark.parametrize("layout", ["hydra", "j_hydra"])
def test_hydra_holds_exactly_one_backbone(layout: str):
    roles = make_roles(layout, SETTING)
    assert n_backbones(roles) == 1
    check_backbones(layout, roles)


@pytest.mark.parametrize(("layout", "n"), [("ppo", 4), ("lora_ppo", 4), ("dynamic_lora", 2)])
def test_the_other_layouts_hold_several(layout: str, n: int):
    assert n_backbones(make_roles(layout, SETTING)) == n


def test_a_hydra_that_copied_its_backbone_is_refused():
    roles = make_roles("hydra", SETTING)
    shared = roles.named_backbone("shared")
    roles.backbones["alias"] = shared
    check_backbones("hydra", roles)  # the same storages under another name
    roles.backbones["copy"] = deepcopy(shared)
    with pytest.raises(ValueError, match="hydra holds 2 backbones by the storages"):
        check_backbones("hydra", roles)


@pytest.mark.parametrize("limit", [99, 100, 109, 110, 200, 1005])
@pytest.mark.parametrize("guess", [1, 2, 7, 40, 200])
def test_the_largest_batch_is_found_from_any_guess(limit: int, guess: int):
    # 90 + 10 per row: one row needs 100
    assert largest_fitting(lambda batch: 90 + 10 * batch, limit, guess) == max((limit - 90) // 10, 0)


def test_a_right_guess_costs_two_measurements():
    asked = []

    def peak_of(batch: int) -> int:
        asked.append(batch)
        return 10 * batch

    assert largest_fitting(peak_of, 75, guess=7) == 7
    assert asked == [7, 8]


def test_parts_add_up_to_each_peak():
    held = measure_held(make_run("lora_ppo", SETTING), 2)
    assert list(held.phases) == ["sampling", "scoring", "update"]
    for phase, found in held.phases.items():
        parts = parts_at_peak(held, phase)
        assert sum(parts.values()) == found.peak_bytes
        assert min(parts.values()) >= 0


def test_gradients_count_in_a_peak_that_they_are_part_of():
    # Few tokens: the peak is the optimizer's step, which needs every gradient.
    held = measure_held(make_run("ppo", replace(SETTING, prompt_len=2, response_len=3)), 1)
    assert held.phases["update"].gradient_bytes == held.gradients > 0
    # Between iterations there are none.
    assert held.phases["sampling"].gradient_bytes == held.phases["scoring"].gradient_bytes == 0
    # Many tokens: the peak is the first backward pass, before any gradient is there.
    held = measure_held(make_run("j_hydra", SETTING), 4)
    assert held.phases["update"].gradient_bytes < held.gradients


def test_more_rows_take_more_and_the_rest_stays():
    run = make_run("hydra", SETTING)
    two, four = measure_held(run, 2), measure_held(run, 4)
    assert four.resident == two.resident
    assert four.kv == 2 * two.kv
    assert four.peak > 1.5 * two.peak - two.resident


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not():
    limit = measure_held(make_run("lora_ppo", SETTING), 1).peak
    result = measure("j_hydra", SETTING, 2, 1, limit)
    assert result.largest_batch >= 2
    assert result.peak_at_largest <= limit
    assert measure_held(make_run("j_hydra", SETTING), result.largest_batch + 1).peak > limit
    row = row_of(result, SETTING, limit)
    assert row["setting"]["cache"] == "random 12+4"
    assert row["held"]["phases"]["update"]["peak_bytes"] == result.held.peak


def test_no_response_ends_early():
    size = PRESETS["tiny"]
    tokenizer = make_tokenizer(size.vocab_size)
    assert tokenizer.eos_token_id == size.vocab_size  # the logits end one before
    assert tokenizer.pad_token_id == PAD
    # A number is one token, also where its digits are those of a special one.
    assert tokenizer.encode("10 100 7", add_special_tokens=False) == [10, 100, 7]


def test_the_figure_has_a_bar_for_each_phase():
    held = Held(10, 2, 1, 4, 3, 5)
    held.phases = {name: Phase(40, 3 * (name == "update")) for name in ("sampling", "scoring", "update")}
    results = [Result(name, 4, held, {}, Seconds(1.0, 1.0)) for name in LAYOUTS]
    axes = draw(results).axes[0]
    assert [label.get_text().split()[-1] for label in axes.get_yticklabels()] == [*held.phases] * 5
    right_ends = {bar.get_x() + bar.get_width() for bar in axes.patches}
    assert max(right_ends) == pytest.approx(40 / 1e6)
    assert torch.tensor(sorted(right_ends)).min() > 0
