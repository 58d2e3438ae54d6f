import io
import json
from dataclasses import asdict, replace

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from lit_rlkv.config import ConfigError
from lit_rlkv.evaluate import evaluate
from lit_rlkv.fit import fit, main
from lit_rlkv.kernels.backend import set_kernels
from lit_rlkv.kernels.decode_attention import kernel
from lit_rlkv.kernels.shadow_attention import segment_plan, set_shadow_attention
from lit_rlkv.kvcache import POLICIES
from lit_rlkv.models import attention
from lit_rlkv.reporting.pictures import figures
from lit_rlkv.reporting.report import render
from lit_rlkv.reporting.run_folder import read_run
from lit_rlkv.run_files import CONFIG
from tests.forks import ended
from tests.tiers import slow
from tests.whole_runs import TINY, config, plain_reports, rows_of, run, scoring


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory):
    """A folder in which a first run has left its SFT model."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder, "first", draws=True)
    return folder


def test_a_run_leaves_everything_in_its_folder(sft_runs):
    folder = sft_runs / "first"
    assert OmegaConf.load(folder / "config.yaml").cache.budget == 7
    rows = rows_of(folder)
    assert [row["iteration"] for row in rows] == ["1.0", "2.0"]
    standard = {
        "loss", "reward", "reward_std", "frac_reward_zero_std", "entropy", "completions/mean_length",
        "clip_ratio/region_mean", "rollout_corr/kl", "rollout_corr/rollout_is_eff_sample_size", "smd/kl",
        "kv/replay_gap", "grad_norm", "learning_rate", "tokens_per_second",
    }  # fmt: skip
    assert standard <= rows[0].keys()
    assert all(float(row["kv/replay_gap"]) < 1e-4 for row in rows)
    saved = json.loads((folder / "evaluation.json").read_text())
    assert [row["cache"] for row in saved["after"]] == ["dense", "random 7+2", "random 5+2"]
    assert saved["after"][1]["kv_bytes"] < saved["after"][0]["kv_bytes"]
    assert saved["after"][1]["kl"] != 0.0
    assert max(row["replay_gap"] for row in saved["before"] + saved["after"]) < 1e-4
    assert "<html" in (folder / "report.html").read_text()
    assert len(list((folder / "checkpoints").glob("iteration-*"))) == 2


def test_a_second_run_starts_at_rl_from_the_sft_model(sft_runs):
    run(sft_runs, "second", "stages=[rl,eval]")
    assert not (sft_runs / "second" / "sft_metrics.csv").exists()
    assert (sft_runs / "first" / "sft_metrics.csv").exists()
    first, second = (rows_of(sft_runs / name) for name in ("first", "second"))
    assert [row["loss"] for row in first] == [row["loss"] for row in second]


@pytest.mark.parametrize(
    ("stages", "lines"),
    [
        ("[sft]", ["sft skipped: start from ", "rl not in stages"]),
        ("[rl]", ["sft not in stages: start from ", "rl 1 iterations"]),
    ],
)
def test_stages_that_are_left_out_or_skipped_are_named(sft_runs, stages, lines):
    console = Console(file=io.StringIO(), width=200)
    cfg = config(sft_runs, f"stages={stages}", "algorithm.n_iterations=1", "diagnostics=none")
    with plain_reports():
        fit(cfg, sft_runs / f"left-out-{stages}", console)
    said = console.file.getvalue().splitlines()
    assert said[0] == f"run        {sft_runs / f'left-out-{stages}'}"
    for line in [*lines, "eval not in stages"]:
        assert sum(one.startswith(line) for one in said) == 1, said


def test_a_folder_that_holds_a_run_is_not_overwritten(sft_runs):
    before = (sft_runs / "first" / CONFIG).read_text()
    with pytest.raises(ConfigError, match="holds a run already; give resume="):
        run(sft_runs, "first", "seed=7")
    assert (sft_runs / "first" / CONFIG).read_text() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["stages=[rl,eval]"], r"add sft to stages, or give model\.path"),
        (["rollout.max_new_tokens=4"], "cuts worked solutions, which take up to"),
        (["rollout.max_new_tokens=5000"], "has positions for 1024"),
        (["rollout.cuda_graph=true"], "rollout.cuda_graph=true needs CUDA, got device cpu"),
        (["rollout.n_splits=1"], "rollout.n_splits=1 needs the Triton kernels, which do not run on cpu"),
        (["kernels=triton", "fabric.precision=64-true"], "kernels: kernels=triton takes float32, float16"),
        (["roles.target_modules=[q_proj,zzz]"], "this model has no module zzz; choose from .*q_proj"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, "run", *options)
    set_kernels("auto")
    assert not (tmp_path / "sft_models").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
    rows = tmp_path / "run" / "sft_metrics.csv"
    assert not rows.exists() or not rows.read_text().strip()


def test_a_diagnostic_that_cannot_measure_the_policy_is_refused_before_it_is_evaluated(sft_runs):
    with pytest.raises(ConfigError, match=r"diagnostics: only must match a parameter .*, got 'zzz'"):
        run(sft_runs, "only", "diagnostics.gradient.only=zzz")
    assert not (sft_runs / "only" / "evaluation.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        slow(["algorithm.n_minibatches=2", "algorithm.n_epochs=2"]),
        ["algorithm.kl.weight=0.1"],
        slow(["algorithm.lr_schedule=constant"]),
        slow(["algorithm.entropy_coef=0.1"]),
        ["distillation=dense_student"],
        slow(["distillation.anchor_weight=0.1"]),
        ["cache.policy=snapkv"],
        slow(["roles.rank=4"]),
    ],
)
def test_options_change_the_training(sft_runs, options):
    name = "-".join(options).replace("/", "_")
    run(sft_runs, name, *options, "stages=[rl]", "diagnostics=none")
    changed, default = (rows_of(sft_runs / folder) for folder in (name, "first"))
    assert [row["loss"] for row in changed] != [row["loss"] for row in default]


@pytest.mark.slow
def test_the_bias_correction_of_the_kl_reaches_the_loss(sft_runs):
    options = ["algorithm.kl.weight=0.5", "algorithm.n_minibatches=2", "stages=[rl]", "diagnostics=none"]
    losses = []
    for value in ("true", "false"):
        run(sft_runs, f"kl-{value}", *options, f"algorithm.kl.bias_correction={value}")
        losses.append([row["loss"] for row in rows_of(sft_runs / f"kl-{value}")])
    assert losses[0] != losses[1]


def test_fewer_rollout_rows_need_a_smaller_cache(sft_runs):
    run(sft_runs, "few-rows", "rollout.max_rows=4", "stages=[rl]", "diagnostics=none")
    few, whole = (rows_of(sft_runs / folder) for folder in ("few-rows", "first"))
    # 8 prompts with 2 responses each
    assert float(few[0]["kv/bytes"]) * 4 == float(whole[0]["kv/bytes"])
    assert float(few[0]["kv/replay_gap"]) < 1e-4


@pytest.mark.slow
def test_a_run_and_its_evaluation_use_the_configured_kernels(sft_runs, monkeypatch):
    called, attend = [], kernel.decode_attention

    def fails_once_configured(*args, n_splits, **options):
        called.append(n_splits)
        if n_splits == wanted:
            raise ZeroDivisionError
        return attend(*args, n_splits=n_splits, **options)

    monkeypatch.setattr(kernel, "decode_attention", fails_once_configured)
    wanted = 3
    with pytest.raises(ZeroDivisionError):
        run(
            sft_runs,
            "by-triton",
            "kernels=triton",
            "rollout.n_splits=3",
            "stages=[eval]",
            f"model.path={sft_runs / 'first' / 'backbone'}",
        )
    assert called[-1] == 3
    assert set(called[:-1]) == {None}  # of the check that the model can be replayed
    called.clear()
    wanted = None
    options = replace(scoring(sft_runs / "first"), kernels="triton")
    with pytest.raises(ZeroDivisionError):
        evaluate(options)
    set_kernels("auto")
    assert called == [None]


def test_segments_learn_as_lists_do(sft_runs, monkeypatch):
    called, attend = [], attention.segment_attention

    def counted(*args):
        called.append(len(args))
        return attend(*args)

    monkeypatch.setattr(attention, "segment_attention", counted)
    monkeypatch.setattr(segment_plan, "MIN_QUERIES", 1)
    losses = []
    for name in ("lists", "segments"):
        model = f"model.path={sft_runs / 'first' / 'backbone'}"
        run(sft_runs, f"by-{name}", f"roles.shadow_attention={name}", "stages=[rl]", model)
        losses.append([float(row["loss"]) for row in rows_of(sft_runs / f"by-{name}")])
        assert bool(called) == (name == "segments")
    set_shadow_attention("lists")
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_runs_in_mixed_precision(sft_runs, policy):
    run(
        sft_runs,
        f"mixed-{policy}",
        f"cache.policy={policy}",
        "fabric.precision=bf16-mixed",
        "stages=[rl]",
        f"model.path={sft_runs / 'first' / 'backbone'}",
    )
    assert len(rows_of(sft_runs / f"mixed-{policy}")) == 2


@pytest.mark.parametrize(
    "algorithm",
    [
        *map(slow, ("dr_grpo", "dapo", "rloo", "reinforce++", "reinforce++_plain", "gspo", "cispo", "remax")),
        "ppo",
        *map(slow, ("dppo_tv", "dppo_kl", "sapo", "gpg", "geo_mean", "kl_cov", "opo", "gdpo")),
        "clip_cov",
        slow("online_dpo"),
    ],
)
def test_every_algorithm_runs(sft_runs, algorithm):
    # What sets them apart is tested on batches with rewards, in tests/modules and tests/advantages.
    run(sft_runs, algorithm, f"algorithm={algorithm}", "stages=[rl]")
    assert len(rows_of(sft_runs / algorithm)) == 2


@pytest.mark.slow
def test_rlhf_runs_from_on_policy_pairs_to_a_report_and_evaluates_again_alike(sft_runs):
    overrides = ["experiment=rlhf", "sft.on_policy_pairs.n_prompts=64", "roles.value_init=reward"]
    results = run(sft_runs, "rlhf", *overrides, draws=True)
    assert results.reward_model.n_pairs == 16
    assert all(row.learned_reward is not None for row in results.before + results.after)
    row = rows_of(sft_runs / "rlhf")[-1]
    for name in ("rewards/learned", "rewards/exact_match", "value_loss", "value/explained_variance"):
        assert row[name] != "", name
    page = (sft_runs / "rlhf" / "report.html").read_text()
    assert "Proxy and gold" in page
    assert "Reward model on 16 held-out pairs" in page
    drawn_again = read_run(sft_runs / "rlhf")
    assert render(drawn_again, figures(drawn_again)) == page
    again = evaluate(scoring(sft_runs / "rlhf"))
    assert again.settings["iteration"] == 2
    assert again.rows == results.after


def test_evaluate_scores_a_saved_run_as_the_run_itself_did(sft_runs):
    saved = json.loads((sft_runs / "first" / "evaluation.json").read_text())["after"]
    assert [asdict(row) for row in evaluate(scoring(sft_runs / "first")).rows] == saved


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cache.budget=3"], "error: cache: budget must be at least sink + window + 1 = 4, got 3"),
        (["cache.bugdet=3"], "error: unknown key 'cache.bugdet': did you mean 'cache.budget'?"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_error(tmp_path, arguments, says):
    overrides = [*arguments, f"runs_dir={tmp_path}", f"hydra.run.dir={tmp_path}/run"]
    code, said = ended(main, *TINY, *overrides)
    assert code == 1
    assert says in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_resumed_run_says_what_it_is_and_keeps_its_choices(tmp_path, sft_runs):
    model, folder = f"model.path={sft_runs / 'first' / 'backbone'}", tmp_path / "mine"
    arguments = ["experiment=tis", "seed=3", "stages=[rl]", "diagnostics=none", "algorithm.n_iterations=1"]
    starts = ([*arguments, model, f"runs_dir={tmp_path}", f"hydra.run.dir={folder}"], [f"resume={folder}"])
    headers = []
    for options in starts:
        code, said = ended(main, *([] if options[0].startswith("resume") else TINY), *options)
        assert code == 0, said
        names = ["run", "task", "model", "algorithm", "arm", "cache", "seed", "devices", "stages"]
        names.append("debug=fast")
        headers.append([line for line in said.splitlines() if line.split(" ")[0] in names])
    first, second = headers
    assert first == second
    assert len(first) == 10
    assert first[0].split() == ["run", str(folder)]
    assert first[4].split(maxsplit=2)[:2] == ["arm", "tis:"]


@pytest.mark.parametrize("failure", [ConfigError("a mistake"), RuntimeError("something else")])
def test_a_run_that_fails_before_it_writes_leaves_no_folder(tmp_path, monkeypatch, failure):
    def fail(*args):
        assert (tmp_path / "run").is_dir()  # made before the config is checked
        raise failure

    monkeypatch.setattr("lit_rlkv.runs.preflight.build_and_check", fail)
    monkeypatch.setattr("sys.argv", ["fit", *TINY, f"runs_dir={tmp_path}", f"hydra.run.dir={tmp_path}/run"])
    with pytest.raises(SystemExit if isinstance(failure, ConfigError) else RuntimeError):
        main()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["runs_dir=null", "resume=true", "seed"])
def test_settings_that_name_no_folder_are_refused_before_one_is_made(tmp_path, monkeypatch, setting):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fit", *TINY, setting])
    with pytest.raises(SystemExit, match="error: "):
        main()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--help"], "algorithm: cispo, clip_cov, custom, dapo,"),
        (["--cfg", "job"], "policy: random"),
    ],
)
def test_help_and_config_are_shown_without_running(tmp_path, flags, says):
    code, said = ended(main, *TINY, f"hydra.run.dir={tmp_path}/run", *flags)
    assert code == 0
    assert says in said
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_full_at_the_end_is_one_line_and_the_run_can_be_resumed(sft_runs, monkeypatch, capsys):
    folder = sft_runs / "full [" / "bold] :smile:"  # neither is markup
    options = [*TINY, "stages=[rl]", "diagnostics=none", f"runs_dir={sft_runs}", f"hydra.run.dir='{folder}'"]
    monkeypatch.setattr("sys.argv", ["fit", *options])

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("lit_rlkv.runs.outputs.render", fail)
        with pytest.raises(SystemExit) as ended:
            main()
    assert str(ended.value.code).startswith(
        "error: the disk is full: [Errno 28] No space left on device; resume"
    )
    assert "\n" not in str(ended.value.code)
    assert len(list((folder / "checkpoints").glob("iteration-*"))) == 2
    monkeypatch.setattr("sys.argv", ["fit", f"resume='{folder}'"])
    main()
    assert f"report: {folder}/report.html" in capsys.readouterr().err
