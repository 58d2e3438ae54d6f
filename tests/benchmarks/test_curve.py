import curve
import pytest
import record


@pytest.mark.slow
def test_nothing_has_moved_curves_since_the_figures_on_record(tmp_path):
    moved = curve.moved(curve.measure(tmp_path), curve.on_record()["figures"])
    assert moved is None, moved


def test_what_moves_a_curve_names_what_is_to_be_run_again():
    then = curve.on_record()["figures"]
    rounded = {name: value * (1 + 1e-5) for name, value in then.items()}
    assert curve.moved(rounded, then) is None
    said = curve.moved(then | {"smd/kl": 1.01 * then["smd/kl"]}, then)
    assert "smd/kl" in said
    assert "entropy" not in said
    assert "make notebooks" in said


def test_the_main_comparison_is_of_the_code_that_the_figures_on_record_are_of():
    rows = [row for row in record.rows("study") if row["task"] == "chain_sum"]
    assert rows
    assert min(row["date"] for row in rows) >= curve.on_record()["date"]
