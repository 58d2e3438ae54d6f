import pytest

from lit_rlkv.callbacks.diagnostic import Diagnostic, DiagnosticsFile
from lit_rlkv.files import json_lines
from lit_rlkv.run_files import DIAGNOSTICS as FILE_NAME
from tests.callbacks.measuring import assert_same_training, trained
from tests.hand_built import make_datamodule, make_roles


class Counting(Diagnostic):
    """Counts its calls."""

    name = "counting"
    n = 0

    def measure(self, experience):
        self.n += 1
        self.scalars, self.arrays = {"n": float(self.n)}, {"found": [self.n]}


def iterate(diagnostic, file, n_iterations, first=0):
    """The metrics of each iteration, as the loop would ask for them."""
    experience = make_datamodule(make_roles()).collect()
    rows = []
    for iteration in range(first, n_iterations):
        object.__setattr__(experience, "iteration", iteration)
        metrics: dict[str, float] = {}
        diagnostic.on_rollout_end(experience)
        for callback in (diagnostic, file):
            callback.on_iteration_end(iteration + 1, n_iterations, metrics)
        rows.append(metrics)
    return rows


def test_a_diagnostic_measures_at_its_interval_and_logs_its_time(tmp_path):
    diagnostic = Counting(every=2)
    rows = iterate(diagnostic, DiagnosticsFile(tmp_path, [diagnostic]), 4)
    assert [row.get("n") for row in rows] == [1.0, None, 2.0, None]
    assert [row.get("time/diagnostics/counting", 0) > 0 for row in rows] == [True, False, True, False]


def test_arrays_are_written_once_and_an_iteration_without_a_measurement_adds_no_row(tmp_path):
    diagnostic = Counting(every=2)
    iterate(diagnostic, DiagnosticsFile(tmp_path, [diagnostic]), 4)
    assert json_lines(tmp_path / FILE_NAME) == [
        {"iteration": 1, "name": "counting", "found": [1]},
        {"iteration": 3, "name": "counting", "found": [2]},
    ]


@pytest.mark.parametrize(("resumed_at", "kept"), [(2, [1, 2]), (0, []), (4, [1, 2, 3, 4])])
def test_a_resumed_run_keeps_measurements_up_to_its_checkpoint(tmp_path, resumed_at, kept):
    diagnostic = Counting()
    iterate(diagnostic, DiagnosticsFile(tmp_path, [diagnostic]), 4)
    again = Counting()
    file = DiagnosticsFile(tmp_path, [again], resumed_at)
    assert [row["iteration"] for row in json_lines(tmp_path / FILE_NAME)] == kept
    iterate(again, file, resumed_at + 1, first=resumed_at)
    assert [row["iteration"] for row in json_lines(tmp_path / FILE_NAME)] == [*kept, resumed_at + 1]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize("every", [0, -1, 5.5, "abc", None, True])
def test_an_invalid_interval_is_refused(every):
    with pytest.raises(
        ValueError, match=r"diagnostics\.counting\.every must be a whole number of at least 1"
    ):
        Counting(every=every)


def test_a_diagnostic_that_meddles_with_training_would_be_noticed():
    class Meddling(Diagnostic):
        name = "meddling"

        def measure(self, experience):
            next(p for p in self.policy.parameters() if p.requires_grad).add_(1e-6)

    plain = trained([])
    assert_same_training(plain, trained([]))
    with pytest.raises(AssertionError):
        assert_same_training(plain, trained([Meddling()]))
