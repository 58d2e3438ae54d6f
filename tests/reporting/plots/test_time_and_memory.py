import pytest

from lit_rlkv.reporting.plots import time_and_memory

MIB = 2**20


def row(iteration, **others):
    times = {"time/rollout": 3.0, "time/score": 1.0, "time/reward": 0.5, "time/update": 2.0}
    return {"iteration": iteration, **times, **others}


def test_phases_stand_on_one_another_and_diagnostics_on_top():
    history = [row(1, **{"time/diagnostics/cache": 0.25, "time/diagnostics/mismatch": 0.5}), row(2)]
    axes = time_and_memory.time_per_phase(history).axes[0]
    bars = {found.get_label(): list(found) for found in axes.containers}
    assert list(bars) == ["rollout", "score", "reward", "update", "diagnostics"]
    assert [(bar.get_y(), bar.get_height()) for bar in bars["update"]] == [(4.5, 2.0), (4.5, 2.0)]
    assert [bar.get_height() for bar in bars["diagnostics"]] == [0.75, 0.0]


def test_an_iteration_without_the_measurement_has_no_bar():
    history = [row(1), {"iteration": 2, "time/update": 2.0}, row(3)]
    bars = time_and_memory.time_per_phase(history).axes[0].containers[0]
    assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == [1, 3]


@pytest.mark.parametrize(
    ("kind", "label"), [("peak", "MiB allocated at most"), ("resident_peak", "MiB resident at most")]
)
def test_peaks_are_drawn_in_mebibytes_and_named_for_what_they_are(kind, label):
    history = [
        row(i, **{f"memory/rollout/{kind}": 4.0 * MIB, f"memory/update/{kind}": i * MIB}) for i in (1, 2)
    ]
    axes = time_and_memory.memory_per_phase(history).axes[0]
    assert axes.get_ylabel() == label
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {
        "rollout": [4.0, 4.0],
        "update": [1.0, 2.0],
    }
    assert time_and_memory.has_memory(history)


def test_pictures_without_data_say_so():
    for figure in (time_and_memory.time_per_phase([]), time_and_memory.memory_per_phase([row(1)])):
        assert figure.axes[0].texts[0].get_text() in ("no phase was timed", "no memory was measured")
    assert not time_and_memory.has_memory([row(1)])


def test_stages_are_bars_of_their_seconds():
    axes = time_and_memory.time_per_stage({"sft": 95.0, "rl": 12.5}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [95.0, 12.5]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["sft", "rl"]
