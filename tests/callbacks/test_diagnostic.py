import json
import re

import pytest

from lit_rlkv.callbacks.cache_statistics import CacheStatistics
from lit_rlkv.callbacks.diagnostic import Diagnostic, DiagnosticsFile
from lit_rlkv.callbacks.gradient_sources import GradientSources
from lit_rlkv.callbacks.gradient_variance import GradientVariance
from lit_rlkv.callbacks.mismatch import DenseMismatch, LayerMismatch
from lit_rlkv.callbacks.performance import Performance
from lit_rlkv.files import json_lines
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.run_files import DIAGNOSTICS as FILE_NAME
from tests.callbacks.measuring import assert_same_training, measured, trained
from tests.hand_built import make_datamodule, make_roles, shift


class Counting(Diagnostic):
    """Counts its calls."""

    name = "counting"
    n = 0

    def measure(self, experience):
        self.n += 1
        self.scalars, self.arrays = {"n": float(self.n)}, {"found": [self.n]}

    def measure_updates(self, experience, split):
        self.scalars["updates"] = float(self.n)


def iterate(diagnostic, file, n_iterations, first=0):
    """The metrics of each iteration, as the loop would ask for them."""
    experience = make_datamodule(make_roles()).collect()
    rows = []
    for iteration in range(first, n_iterations):
        object.__setattr__(experience, "iteration", iteration)
        metrics: dict[str, float] = {}
        diagnostic.on_rollout_end(experience)
        diagnostic.on_update_start(experience, None)
        for callback in (diagnostic, file):
            callback.on_iteration_end(iteration + 1, n_iterations, metrics)
        rows.append(metrics)
    return rows


def test_a_diagnostic_measures_at_its_interval_and_logs_its_time(tmp_path):
    diagnostic = Counting(every=2)
    rows = iterate(diagnostic, DiagnosticsFile(tmp_path, [diagnostic]), 4)
    for name in ("n", "updates"):
        assert [row.get(name) for row in rows] == [1.0, None, 2.0, None]
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


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({"iteration": 1, "name": "counting"}) + "\n" + '{"iteration": 2, "na')
    assert [row["iteration"] for row in json_lines(path)] == [1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [CacheStatistics, DenseMismatch, LayerMismatch])
def test_the_policy_is_measured_with_its_adapter_in_every_layout(layout, make):
    roles = shift(make_roles(layout), std=0.3)
    experience = make_datamodule(roles).collect()
    found, _ = measured(make(), roles, experience)
    assert max(found.values()) > 1e-4
    for name, parameter in roles.named_parameters():
        parameter.data.zero_() if "lora_B" in name else None
    is_same = measured(make(), roles, experience)[0] == found
    assert is_same == (roles.layout.adapter["policy"] is None)


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("make", "option", "values"),
    [
        (Counting, "every", [0, -1, 5.5, "abc", None, True]),
        (CacheStatistics, "n_rows", [0]),
        (CacheStatistics, "needed", [0.0, 1.0]),
        (DenseMismatch, "n_rows", [0, 5.5, "abc", None, True]),
        (DenseMismatch, "tokens_per_pass", [0]),
        (Performance, "peak_flops", [0, -1.0]),
        (GradientVariance, "n_parts", [1, 2.5]),
        (GradientVariance, "blocks", ["head"]),
        (GradientVariance, "terms", [["value"], []]),
        (GradientVariance, "only", ["("]),
        (GradientVariance, "sketch", [0, True]),
        (GradientSources, "counterfactual", ["shadow", "ppo"]),
    ],
)
def test_an_option_without_a_meaning_is_refused_by_its_name(make, option, values):
    for value in values:
        said = (value or ["none"])[0] if isinstance(value, list) else value
        with pytest.raises(ValueError, match=rf"{option}.*{re.escape(str(said))}"):
            make(**{"every": 1} | {option: value})


def test_a_diagnostic_that_meddles_with_training_would_be_noticed():
    class Meddling(Diagnostic):
        name = "meddling"

        def measure(self, experience):
            next(p for p in self.policy.parameters() if p.requires_grad).add_(1e-6)

    plain = trained([])
    assert_same_training(plain, trained([]))
    with pytest.raises(AssertionError):
        assert_same_training(plain, trained([Meddling()]))
