import json
import math

import gradient_variance
import pytest
import record
from gradient_parts.sketches import SIZES

from tests.whole_runs import TINY


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """All three measurements at toy size, of the arm that has a gradient even where no reward is earned."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "RESULTS", folder)
        patch.setattr(gradient_variance, "SEEDS", 3)
        overrides = [*TINY, f"runs_dir={folder}"]
        asked = ["--arms", "smd", "--rollouts", "4", "--cost-iterations", "3"]
        patch.setattr("sys.argv", ["gradient_variance.py", *asked, *overrides])
        gradient_variance.main()
    lines = (folder / "gradient_variance.jsonl").read_text().splitlines()
    return {row["kind"]: row for row in map(json.loads, lines)}


@pytest.mark.slow
def test_a_run_records_cost_sketches_and_brute_force(rows):
    assert set(rows) == {"cost", "sketch", "brute_force"}
    gradient = rows["cost"]["gradient"]
    share = gradient["seconds"] / gradient["every"] / rows["cost"]["step_s"]
    assert gradient["share"] == pytest.approx(share)
    assert rows["cost"]["gradient_sources"]["seconds"] > 0
    assert set(rows["sketch"]["sketches"]) == {str(size) for size in SIZES}
    assert sum(block["variance_share"] for block in rows["sketch"]["blocks"].values()) == pytest.approx(1.0)


@pytest.mark.slow
def test_brute_force_and_estimate_are_of_the_same_quantity(rows):
    found = rows["brute_force"]
    # four rollouts know a variance to a factor only; a wrong quantity would be off by the eight parts
    assert 1 / 4 < found["estimate"] / found["brute_force"] < 4
    difference = math.hypot(found["brute_force_se"], found["estimate_se"])
    assert found["errors_off"] * difference == pytest.approx(found["estimate"] - found["brute_force"])
