from dataclasses import replace
from pathlib import Path

import pytest
import rollout
import torch
from rollout_parts.schedules import powers_up_to, predicted, time_schedules
from rollout_parts.setting import Setting

TOY = Setting(preset="tiny", policy="h2o", batch=4, new=24, rounds=1, device=torch.device("cpu"))


def test_a_toy_run_measures_ours_and_theirs(tmp_path: Path):
    ours, theirs = rollout.time_ours(TOY, 16), rollout.time_theirs(TOY)
    assert ours["tokens_per_s"] == pytest.approx(4 * 24 / ours["median_s"])
    # 16 + 8 slots where a dense cache has 16 + 24 columns
    assert ours["kv_of_dense"] == pytest.approx(24 / 40)
    assert theirs["batch"] == 4
    rollout.plot([ours, theirs], tmp_path / "rollout.png")
    assert (tmp_path / "rollout.png").stat().st_size > 10_000


@pytest.mark.parametrize("budget", [16, 64])
def test_deaths_that_the_sampler_did_not_see_are_not_timed(budget: int, monkeypatch: pytest.MonkeyPatch):
    plain = Setting.roll_out

    def wrong(setting: Setting, *args: object, **options: object):
        found = plain(setting, *args, **options)
        return replace(found, evicted_at=found.evicted_at.roll(1, dims=2))

    rollout.check(TOY, budget)
    monkeypatch.setattr(Setting, "roll_out", wrong)
    with pytest.raises(RuntimeError, match="replay other log-probs"):
        rollout.check(TOY, budget)


def test_the_three_schedules_match_hand_arithmetic():
    # Two rows; a step costs 1 s for one row and 1.5 s for two.
    found = predicted([4, 1, 2, 3], 2, {1: 1.0, 2: 1.5})
    # wait: batches [4, 1] and [2, 3] take 4 + 3 steps of both rows
    assert found["wait"] == 7 * 1.5
    # shrink: 1 step of two and 3 of one, then 2 of two and 1 of one
    assert found["shrink"] == (1 * 1.5 + 3) + (2 * 1.5 + 1)
    # refill: row 0 writes 4; row 1 writes 1, then 2, and free at 3 before the other, 3 more
    assert found["refill"] == 6 * 1.5


def test_widths_are_powers_of_two_and_the_batch_itself():
    assert powers_up_to(6) == [1, 2, 4, 6]
    assert powers_up_to(8) == [1, 2, 4, 8]


@pytest.mark.slow
def test_rows_that_refill_answer_everything():
    found = time_schedules(replace(TOY, new=48), TOY.cache(16))
    assert found["responses"] == 16
    assert found["median_s"].keys() == {"refill", "wait"}
    assert found["longest"] > found["mean_length"] > 1
