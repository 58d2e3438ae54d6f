"""Steps beside TRL: equal sizes, seconds that add up, and operations by kind."""

import peers
import pytest
from peers import (
    N_WARM,
    PHASES,
    Alternate,
    Step,
    compare,
    context_of,
    medians,
    table,
    train_here,
    write_model,
)


@pytest.fixture
def _small(monkeypatch):
    for name, value in {"N_PROMPTS": 2, "GROUP_SIZE": 2, "N_TOKENS": 6, "N_LAYERS": 1}.items():
        monkeypatch.setattr(peers, name, value)


@pytest.mark.usefixtures("_small")
def test_every_response_is_full_and_the_parts_of_a_step_add_up(tmp_path):
    write_model(tmp_path)
    called = []
    context = context_of(tmp_path, peers.CACHES["all keys"], 2)
    steps = train_here(context, tmp_path / "ours", Alternate(lambda: called.append(len(called))))
    assert called == [0, 1]
    assert [step.n_tokens for step in steps] == [2 * 2 * 6] * 2
    for step in steps:
        parts = sum(step.seconds[phase] for phase in PHASES[:-1])
        assert 0 < parts == pytest.approx(step.seconds["total"])


def test_medians_leave_out_the_first_steps():
    slow, fast = (Step(dict.fromkeys(PHASES, seconds), 1) for seconds in (9.0, 1.0))
    assert medians([slow] * N_WARM + [fast] * 3) == dict.fromkeys(PHASES, 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_both_train_all_weights_on_as_many_tokens():
    pytest.importorskip("trl")
    row = compare("all keys", peers.sys.executable, 1, [])
    assert set(row["seconds"]) == {"ours", "trl"}
    assert row["n_trained"] > 200_000
    assert row["times_as_fast"] > 0
    assert "TRL" in table(row)


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_a_python_without_trl_is_refused_in_one_line(tmp_path):
    write_model(tmp_path)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'trl'\" >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(SystemExit, match="No module named 'trl'; see --trl-python"):
        peers.TrainerProcess(str(fake), tmp_path, 1)
