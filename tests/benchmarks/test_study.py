import csv
import json
import re
from functools import cache

import fit_process
import pytest
import study
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from study_parts import analysis, evictions, measured, plan, runs, tables
from study_parts.plan import Setting

from lit_rlkv.config import CONF_DIR, check_keys
from lit_rlkv.runs.preflight import checked_config


def rate(arm, anchored):
    return 1e-3


def settings():
    """One run of each arm, and one of every other task, policy and budget."""
    listed = [run for block in plan.BLOCKS.values() for run in block(rate)]
    by_arm = {run.name: run for run in reversed(listed)}
    by_place = {(run.task, run.policy, run.budget): run for run in listed}
    return {str(run): run for run in (*by_arm.values(), *by_place.values())}.values()


@cache
def composed(setting):
    fetched = (
        ["model.path=someone/something"] if setting.task == "smollm2" else []
    )  # no test downloads a file
    return composed_of([*setting.overrides, *fetched])


def composed_of(overrides):
    """Return the config as fit composes and checks it."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        full = compose("config", overrides=overrides, return_hydra_config=True)
        with open_dict(full):
            choices = full.pop("hydra").runtime.choices
        check_keys(full, choices, overrides)
        checked_config(full)
    return full


@pytest.mark.slow
def test_every_arm_and_place_of_the_plan_passes_the_checks():
    assert len(settings()) >= 2 * len(plan.ARMS)
    for setting in settings():
        composed(setting)
    for setting in evictions.evictions():
        if setting.seed == 0:
            composed_of(setting.overrides)


@pytest.mark.parametrize("arm", plan.ARMS)
def test_an_anchored_arm_differs_from_its_twin_by_the_anchor_alone(arm):
    free, anchored = (composed(Setting(arm, is_anchored, seed=0, lr=1e-3)) for is_anchored in (False, True))
    assert anchored.distillation.anchor_weight == plan.ANCHOR_WEIGHT
    if free.distillation is None:
        assert anchored.distillation.weight == 0
    else:
        assert free.distillation.anchor_weight == 0
        assert free.distillation.weight == anchored.distillation.weight > 0
    assert free.correction == anchored.correction
    assert free.algorithm == anchored.algorithm


def test_arms_of_the_main_comparison_are_all_different():
    told = {
        str(composed(Setting(arm, is_anchored, seed=0, lr=1e-3)))
        for arm in plan.ARMS
        for is_anchored in (0, 1)
    }
    assert len(told) == 2 * len(plan.ARMS)


def test_the_tuning_seed_is_used_for_nothing_else():
    assert all(run.seed != plan.TUNING_SEED for block in plan.BLOCKS.values() for run in block(rate))


def row(name, seed, sparse, dense=0.99, **more):
    start = {"sparse_accuracy_before": 0.6, "dense_accuracy_before": 1.0}
    ends = {"sparse_accuracy_after": sparse, "dense_accuracy_after": dense}
    return {"name": name, "seed": seed, "task": "chain_sum", **start, **ends, **more}


def test_a_paired_difference_matches_hand_arithmetic():
    first = [row("a", seed, sparse) for seed, sparse in enumerate([0.8, 0.9, 0.7])]
    second = [row("b", seed, sparse) for seed, sparse in [(2, 0.6), (0, 0.6), (1, 0.8), (9, 0.0)]]
    # differences by seed 0.2, 0.1, 0.1: mean 0.4/3, sd 0.0577, standard error 0.0333, t = 4 with 2 degrees
    found = analysis.contrast(first, second, "sparse_accuracy_after")
    assert (found.n, found.mean) == (3, pytest.approx(0.4 / 3))
    assert found.half_width == pytest.approx(4.303 * 0.1 / 3, rel=1e-3)
    # P(|T| > 4) with 2 degrees is 1 − 4/√18
    assert found.p == pytest.approx(1 - 4 / 18**0.5, rel=1e-4)


def test_rows_of_different_processors_are_no_pair():
    ours, theirs = ({"device": f"{name}, 2 cores, 1 threads"} for name in ("AMD EPYC", "Xeon"))
    first = [row("a", 0, 0.8, **ours), row("a", 1, 0.8, **ours), row("a", 2, 0.9, **theirs)]
    second = [row("b", 0, 0.7, **ours), row("b", 1, 0.5, **theirs), row("b", 2, 0.7, **theirs)]
    assert [ours["seed"] for ours, _ in analysis.pairs_of(first, second)] == [0, 2]
    assert analysis.contrast(first, second, "sparse_accuracy_after").mean == pytest.approx(0.15)


def test_runs_from_different_sft_models_are_no_pair():
    first, second = ([row(name, seed, 0.7) for seed in (0, 1)] for name in ("a", "b"))
    second[1]["dense_accuracy_before"] = 0.9
    with pytest.raises(ValueError, match=r"seed 1: a started at 100\.0% with all keys and b at 90\.0%"):
        analysis.contrast(first, second, "sparse_accuracy_after")


def test_two_rows_of_a_seed_are_no_pair():
    twice = [row("a", 0, 0.8), row("a", 0, 0.7)]
    with pytest.raises(ValueError, match="several rows"):
        analysis.contrast(twice, [row("b", 0, 0.7), row("b", 1, 0.7)], "sparse_accuracy_after")


def test_one_common_seed_is_no_paired_test():
    with pytest.raises(ValueError, match="1 seeds in both"):
        analysis.contrast([row("a", 0, 0.8)], [row("b", 0, 0.7), row("b", 1, 0.7)], "sparse_accuracy_after")


def test_holm_multiplies_by_the_questions_left_and_never_falls():
    contrasts = [analysis.Contrast("a", "b", "m", 5, 0.1, 0.1, p) for p in (0.04, 0.01, 0.03)]
    # sorted 0.01·3, 0.03·2, max(0.04·1, 0.06)
    assert analysis.holm(contrasts) == pytest.approx([0.06, 0.03, 0.06])


def test_responses_are_counted_until_the_trailing_mean_reaches_the_goal():
    rewards = [0.0] * 10 + [1.0] * 20
    # ten iterations are averaged: 8 of 10 ones after iteration 18
    assert analysis.rollouts_to({"task": "chain_sum", "rewards": rewards}, 0.8) == 18 * 256
    assert analysis.rollouts_to({"task": "smollm2", "rewards": rewards}, 0.8) == 18 * 32
    assert analysis.rollouts_to({"task": "chain_sum", "rewards": [0.1] * 30}, 0.8) is None


def kept(run_dir, setting):
    results = [
        {"budget": budget, "accuracy": accuracy, "kl": 0.1, "replay_gap": 1e-6, "kv_bytes": 64}
        for budget, accuracy in ((None, 0.99), (setting.budget, 0.6))
    ]
    better = [{**result, "accuracy": result["accuracy"] + 0.01} for result in results]
    (run_dir / "evaluation.json").write_text(json.dumps({"before": results, "after": better}))
    with (run_dir / "metrics.csv").open("w", newline="") as file:
        names = ["reward", "time/data", "time/update", "rollout_corr/rollout_rs_masked_fraction", "entropy"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(
            dict(zip(names, values, strict=True)) for values in ([0.5, 1, 2, 0.1, 1], [0.7, 1, 2, 0.3, 1])
        )


def test_a_row_holds_what_the_run_found(tmp_path):
    setting = Setting("naive", True, seed=0, lr=1e-3)
    kept(tmp_path, setting)
    found = runs.found(tmp_path, setting.budget)
    assert found["sparse_accuracy_before"] == 0.6
    assert found["sparse_accuracy_after"] == pytest.approx(0.61)
    assert found["dense_accuracy_after"] == pytest.approx(1.0)
    assert (found["rollout_seconds"], found["update_seconds"]) == (2, 4)
    assert found["rewards"] == [0.5, 0.7]
    assert found["masked_fraction"] == pytest.approx(0.2)


def test_p_is_adjusted_for_the_questions_of_its_table_and_for_those_of_all():
    ends = {"naive": (0.5, 0.6, 0.7), "shadow": (0.60, 0.72, 0.81), "tis": (0.5, 0.61, 0.72)}
    free = {name: [row(name, n, end) for n, end in enumerate(found)] for name, found in ends.items()}
    anchored = {
        f"{name}+anchor": [row(f"{name}+anchor", *end) for end in enumerate(ends[name])] for name in ends
    }

    def p_values(arms):
        """Return p unadjusted, adjusted within the first table, and over all tables."""
        line = next(
            one for one in tables.contrast_tables(arms)[1].splitlines() if one.startswith("| `shadow")
        )
        return [float(cell) for cell in line.split("|")[-4:-1]]

    p, within, over_all = p_values(free)
    assert p < within <= over_all
    assert p_values(free | anchored)[:2] == [p, within]
    assert p_values(free | anchored)[2] > over_all


def test_the_tables_of_the_docs_are_what_the_rows_say():
    text = (fit_process.ROOT / "docs" / "results" / "study.md").read_text()
    shown = {runs.NAME: study.FIGURES, "study_earlier": [next(iter(study.COMPARISONS))]}
    for name, titles in shown.items():
        groups = study.comparisons(runs.finished(name))
        for title in titles:
            assert tables.summary_table(tables.by_arm(groups[title])) in text
        assert tables.places_table(groups) in text


def test_the_table_of_learned_evictions_is_what_the_rows_say():
    text = (fit_process.ROOT / "docs" / "results" / "study.md").read_text()
    rows = study.rows_of(evictions.evictions(), runs.finished())
    assert len({row["train_kv_bytes"] for row in rows if row["task"] == "chain_sum"}) == 1
    assert evictions.eviction_table(rows) in text


def test_every_mean_and_spread_in_the_docs_stands_in_the_report():
    number = r"\d+\.\d+ ± \d+\.\d+"
    text = (fit_process.ROOT / "docs" / "results" / "study.md").read_text()
    names = (runs.NAME, "study_earlier")
    printed = re.findall(number, "".join(study.report(runs.finished(name)) for name in names))
    prose = re.findall(number, " ".join(line for line in text.splitlines() if not line.startswith("|")))
    assert len(prose) > 40
    assert set(prose) <= set(printed)


def test_equal_time_gives_quicker_arms_more_iterations(monkeypatch):
    seconds = {f"{arm}+anchor": [1, 1] for arm in plan.SHORT} | {"smd+anchor": [1, 4]}
    monkeypatch.setattr(measured, "rounds", lambda: [{"seconds": seconds}])
    by_arm = {run.arm: run.n_iterations for run in study.settings_of("clock", {})}
    assert by_arm == {"smd": 100, "naive": 250, "tis": 250, "shadow": 250}
