"""Pictures and numbers of docs/concepts and docs/results are those of the code and of the recorded rows.

tests/benchmarks/test_study.py compares the tables of docs/results/study.md.
"""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from matplotlib.image import imread

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = [DOCS / name for name in ("concepts", "results")]
PAGES = {path: path.read_text(encoding="utf-8") for folder in FOLDERS for path in folder.glob("*.md")}


@pytest.fixture(scope="module")
def pictures():
    """The script docs/pictures.py as a module."""
    spec = spec_from_file_location("pictures", DOCS / "pictures.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_stands_on_a_page_that_describes_it():
    shown = {
        (page.parent / path).resolve(): text
        for page, source in PAGES.items()
        for text, path in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", source)
    }
    assert set(shown) == {path for folder in FOLDERS for path in folder.glob("pictures/*")}
    assert min(len(text.split()) for text in shown.values()) >= 15


def test_every_concept_has_a_picture_that_the_script_draws_again(pictures, tmp_path, capsys):
    drawn = {path.name: path for path in pictures.draw(tmp_path)}
    assert set(drawn) == {f"{page.stem}.png" for page in PAGES if page.parent.name == "concepts"}
    printed = capsys.readouterr().out.split()
    for name, path in drawn.items():
        assert str(path) in printed
        assert imread(path).shape == imread(pictures.FOLDER / name).shape


def test_replay_in_the_picture_is_exact_and_the_other_learners_are_not(pictures):
    model = pictures.tiny_model()
    rollout = pictures.sample(model)
    replayed, dense = (pictures.log_ratio(model, rollout, shadow=shadow).abs() for shadow in (True, False))
    assert replayed.max() < 1e-5
    assert dense.max() > 1
    first_evicted = pictures.CACHE.budget + pictures.CACHE.interval - pictures.N_PROMPT + 1
    assert dense[:, :first_evicted].max() < 1e-5
    assert dense[:, first_evicted:].mean() > 0.05


def rows_of(name):
    path = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def page(name):
    return PAGES[DOCS / "results" / f"{name}.md"]


def mb(n_bytes):
    return f"{n_bytes / 1e6:,.0f}"


def test_the_memory_table_is_what_the_last_run_measured():
    rows = rows_of("hydra_memory")
    last = {row["variant"]: row for row in rows if row["setting"] == rows[0]["setting"]}
    base = sum(last["lora_ppo"]["seconds_at_largest"].values())
    for name, row in last.items():
        held = row["held"]
        static = mb(sum(held[part] for part in ("weights", "adapters", "heads", "optimizer")))
        peak = mb(max(phase["peak_bytes"] for phase in held["phases"].values()))
        predicted, seconds = mb(max(row["predicted"].values())), sum(row["seconds"].values())
        cells = [static, peak, predicted, f"{seconds:.2f}", str(row["largest_batch"] or "does not fit"), "–"]
        if row["largest_batch"] is None:
            cells[4] = "–"
        if at_largest := row["seconds_at_largest"]:
            cells[5] = f"{sum(at_largest.values()):.2f}"
            if name != "lora_ppo":
                cells[5] += f" (−{1 - sum(at_largest.values()) / base:.0%})".replace("%", " %")
        label = "full SFT" if name == "sft" else f"`{name}`"
        assert f"| {label} | {' | '.join(cells)} |" in page("memory")
    assert f"{mb(last['hydra']['limit_bytes'])} MB" in page("memory")


def test_the_gpu_tests_that_passed_are_those_of_the_record():
    outcomes = {row["test"]: row["outcome"] for row in rows_of("gpu") if row["record"] == "tests"}
    assert set(outcomes.values()) == {"passed"}
    assert f"**{len(outcomes)} GPU tests ran, and all passed**" in page("gpu")
    assert f"{len(outcomes)} of the 222 GPU tests of that day" in (ROOT / "README.md").read_text("utf-8")


def test_the_work_of_the_learner_is_what_was_counted():
    for row in rows_of("shadow_work"):
        shares = [f"{100 * row[name]:.1f}" for name in ("visible", "forward", "key_gradients")]
        if row["prompt"] == 256:
            assert f"| {row['budget']} | {' % | '.join(shares)} % |" in page("kernels")


def test_the_speed_of_decoding_and_of_ranks_is_that_of_the_last_rows():
    last = {row["policy"]: row["loop_over"] for row in rows_of("decode_overhead")}
    over_pool = {policy: ratio["pool"] for policy, ratio in last.items()}
    assert f"**The decode loop takes {last['random']['transformers']:.2f} times" in page("kernels")
    assert f"takes {over_pool['random']:.2f} times, by policy" in " ".join(page("kernels").split())
    least, most = (
        f"{over_pool[policy]:.2f} (`{policy}`)"
        for policy in (min(over_pool, key=over_pool.get), max(over_pool, key=over_pool.get))
    )
    assert f"from {least} to {most}" in " ".join(page("kernels").split())
    one, two = rows_of("ranks")[-2:]
    rates = [row["rollout_tokens_per_s"] for row in (two, one)]
    text = " ".join(page("kernels").split())
    assert f"{rates[0] / rates[1]:.2f} times the tokens per second" in text
    assert f"({rates[0]:,.0f} against {rates[1]:,.0f}, on an AMD EPYC" in text
    assert f"{two['tokens_per_s'] / one['tokens_per_s']:.2f} times the tokens of whole" in text


def test_the_speed_beside_transformers_and_peft_is_that_of_the_last_rows():
    last = {(row["model"], row["what"]): row for row in rows_of("cpu_speed")}
    hybrid = [row["ratio"] for (model, _), row in last.items() if model == "qwen3_5"]
    text = (DOCS / "concepts/evicting-cache.md").read_text(encoding="utf-8")
    assert all(f"{ratio:.2f} times" in text for ratio in hybrid)
    for row in [row for (model, _), row in last.items() if model != "qwen3_5"]:
        sides = [f"{row[f'{side}_tokens_per_second']:.0f}" for side in ("ours", "theirs")]
        assert f"| {row['what']} | {' | '.join(sides)} | {row['ratio']:.2f} |" in page("kernels")


def test_the_time_by_length_is_that_of_the_last_rows():
    shown = page("kernels")
    for name, cells in {
        "lengths": lambda row: [f"{row['rollout_us']:.0f}", f"{row['learner_us']:.0f}", f"{row['gap']:.0e}"],
        "lengths_attention": lambda row: [f"{row['shadow_ms']:.1f}", f"{row['dense_ms']:.1f}"],
    }.items():
        for row in {row["tokens"]: row for row in rows_of(name)}.values():
            assert f"| {row['tokens']:,} | {' | '.join(cells(row))} |" in shown
    learner = [row["learner_us"] for row in rows_of("lengths")]
    assert f"within {max(learner) / min(learner):.1f} times" in " ".join(shown.split())


def test_the_step_beside_trl_is_that_of_the_record():
    lines = (ROOT / "benchmarks/results/peers.jsonl").read_text().splitlines()
    last = {row["cache"]: row for row in map(json.loads, lines)}
    text = PAGES[DOCS / "results/kernels.md"]
    faster = [f"{last[cache]['times_as_fast']:.2f} times" for cache in ("random 16+5", "all keys")]
    assert "{} as fast with the default cache, {} with all keys".format(*faster) in text
    for name, phase in [("generate", "generate"), ("score", "score"), ("update", "update"), ("all", "total")]:
        cells = [
            f"{1e3 * last[cache]['seconds'][who][phase]:.0f}"
            for cache in ("random 16+5", "all keys")
            for who in ("ours", "trl")
        ]
        assert f"| {name} | {' | '.join(cells)} |" in text


def test_the_tokens_per_second_inside_trl_are_those_of_the_record():
    last = rows_of("trl_side_by_side")[-1]
    text = (DOCS / "how-to/inside-trl.md").read_text(encoding="utf-8")
    for who, found in last["trainers"].items():
        name = f"TRL {last['trl_version']}" if who == "TRL" else f"evicting, {who}"
        low, high = found["times_as_fast_range"]
        ratio = "1" if who == "TRL" else f"{found['times_as_fast']:.2f} ({low:.2f} to {high:.2f})"
        phases = [f"{1e3 * found['seconds'][phase]:.0f}" for phase in ("generate", "update", "total")]
        speeds = [str(found[f"{part}tokens_per_second"]) for part in ("rollout_", "")]
        assert f"| {' | '.join([name, *phases, *speeds, ratio])} |" in text
