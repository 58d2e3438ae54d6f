from pathlib import Path

import pytest
import record
import rollout
import torch
from rollout_parts import ours, theirs
from rollout_parts.setting import Setting
from time_limit import TimeLimit

TOY = Setting(preset="tiny", policy="h2o", batch=4, new=24, rounds=1, device=torch.device("cpu"))


def test_a_toy_run_measures_ours_and_theirs():
    (estimate, our_row), their_row = ours.time_ours(TOY, 16, TimeLimit()), theirs.time_theirs(TOY)
    assert estimate["integrated"]
    assert estimate["first_s"] == our_row["first_s"]
    assert our_row["tokens_per_s"] == pytest.approx(4 * 24 / our_row["median_s"])
    # 16 + 8 slots where a dense cache has 16 + 24 columns
    assert our_row["kv_of_dense"] == pytest.approx(24 / 40)
    assert not our_row["integrated"]
    assert their_row["integrated"]
    assert their_row["batch"] == 4
    # From 16 cached tokens to 16 + 24 - 6; a call of 6 steps less one of 1 sees 1 to 5 more, on average 3.
    assert their_row["lengths"] == [34 + 3, 28 + 3, 22 + 3, 16 + 3]


def test_steps_are_integrated_along_a_line():
    # 1 s and 0.1 s for each cached token: 10 steps with 20 .. 29 tokens take 10 + 0.1 * 245
    steps = theirs.Steps([10.0, 20.0, 40.0], [2.0, 3.0, 5.0])
    assert steps.integrate(20, 10) == pytest.approx(34.5)
    assert steps.fit_error == pytest.approx(0, abs=1e-9)
    assert theirs.Steps([10.0, 20.0, 30.0], [2.0, 3.0, 5.0]).fit_error > 0.05


def test_a_timed_step_of_theirs_feeds_one_token_and_sees_the_whole_cache():
    model = TOY.plain_model()
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(
            (kwargs["hidden_states"].shape[1], kwargs["past_key_values"].get_seq_length())
        ),
        with_kwargs=True,
    )
    theirs.seconds_of_step(TOY, model, 2, 20, 1, 3)
    assert seen == [(1, 20), *[(1, 20)], *[(1, 20 + n) for n in range(3)]]


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch):
    fits = theirs.filled_cache

    def small_memory(setting, model, batch, n_cached):
        if batch > 1:
            raise torch.OutOfMemoryError("no room")
        return fits(setting, model, batch, n_cached)

    monkeypatch.setattr(theirs, "filled_cache", small_memory)
    row = theirs.time_theirs(TOY)
    assert (row["batch"], row["asked_batch"]) == (1, 4)


def test_a_rollout_that_is_cut_off_is_extrapolated_from_its_last_half():
    progress = ours.Progress(TimeLimit(), n_tokens=[0, 10, 20, 40], seconds=[0.0, 1.0, 3.0, 7.0])
    # 20 tokens in the last half took 4 s, so 60 more take 12
    assert progress.whole_s(100) == pytest.approx(7 + 12)
    (row,) = ours.time_ours(TOY, 16, TimeLimit(minutes=0.0))
    assert row["integrated"]
    assert row["measured_new"] < 24
    assert row["kv_mib"] is None


def test_a_restart_measures_what_is_missing(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    sizes = ["--batch", "2", "--new", "24", "--rounds", "1", "--record", "--budgets"]
    asked = ["rollout.py", "--device", "cpu", "--preset", "tiny", *sizes]
    for budgets, minutes in (("16", "9"), ("16 32", "9"), ("16 32 64", "0")):
        monkeypatch.setattr("sys.argv", [*asked, *budgets.split(), "--minutes", minutes])
        rollout.main()
    rows = record.rows("rollout")
    # Each once after its estimate, and none when the time is over.
    assert [(row.get("budget"), row["integrated"]) for row in rows] == [
        (16, True),
        (16, False),
        (None, True),
        (32, True),
        (32, False),
    ]
    assert "64: no time left" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*asked, "16", "--skip-theirs", "--again"])
    rollout.main()
    assert [row.get("budget") for row in record.rows("rollout")][len(rows) :] == [16, 16]


@pytest.mark.parametrize("budget", [16, 64])
def test_deaths_that_the_sampler_did_not_see_are_not_timed(budget: int, monkeypatch: pytest.MonkeyPatch):
    plain = Setting.roll_out

    def wrong(setting: Setting, *args: object, **options: object):
        found = plain(setting, *args, **options)
        return found.with_record(evicted_at=found.evicted_at.roll(1, dims=2))

    ours.check(TOY, budget)
    monkeypatch.setattr(Setting, "roll_out", wrong)
    with pytest.raises(RuntimeError, match="replay other log-probs"):
        ours.check(TOY, budget)
