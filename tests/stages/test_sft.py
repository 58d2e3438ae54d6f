"""Warm-up and the evaluation of its reward head, from the config to the folder."""

import csv
import json
import re
import signal
from unittest.mock import patch

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.config import CONF_DIR, ConfigError
from lit_rlkv.data.prompts import PromptSource, split_of
from lit_rlkv.interrupts import InterruptedRunError, Interruption
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.kv_scorer import KV_SCORER_FILE, kv_scorer_of
from lit_rlkv.reporting.metrics_file import MetricsFile
from lit_rlkv.runs import memory
from lit_rlkv.runs.policy import load_backbone, make_roles
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import REWARD_HEAD, REWARD_MODEL, SFT_DONE, sft_model_dir
from lit_rlkv.stages.evaluation import evaluate_reward, held_out_pairs
from lit_rlkv.stages.sft import SFTStage, run_sft
from lit_rlkv.stages.sft_passes import pass_data, training_passes
from lit_rlkv.tasks import Sorting
from lit_rlkv.trust import trusting
from tests.environments.talkers import COUNTING
from tests.tiers import slow

TINY = [
    "debug=fast",
    "model.preset.hidden_size=32",
    "model.preset.num_hidden_layers=2",
    "model.preset.head_dim=8",
    "model.preset.intermediate_size=64",
    "sft.n_steps=120",
    "sft.n_warmup_steps=5",
    "sft.optimizer.lr=5e-3",
    "evaluation.n_prompts=100",
]
SORTING = ["task=sorting", "task.n_items=3"]
APART, PLAIN, UNWEIGHTED = ["sft.joint=false"], ["sft.n_pairs=0"], ["sft.reward_weight=0"]


class Forgiving(Sorting):
    """A task whose verifier is broken: everything is right."""

    def score(self, problem, completion):
        return 1.0


class LongWinded(Sorting):
    """Wrong completions have no end."""

    def corrupt(self, problem, rng):
        return ",".join(["0"] * 1000)


class Fails(RLCallback):
    """Breaks off at an iteration."""

    def __init__(self, at):
        self.at = at

    def on_iteration_end(self, iteration, n_iterations, metrics):
        if iteration == self.at:
            raise KeyboardInterrupt


def composed(folder, *overrides):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("config", overrides=[*TINY, f"runs_dir={folder}", *overrides])


def parsed(folder, *overrides):
    return checked_config(composed(folder, *overrides))


def config(folder, *overrides):
    cfg = composed(folder, *SORTING, *overrides)
    return checked_config(cfg)


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory):
    """From overrides to a run's parts, its SFT folder, and the rows of its metrics; each is made once."""
    runs, made = tmp_path_factory.mktemp("runs"), {}

    def get(*overrides):
        if overrides not in made:
            parts, metrics = Run(config(runs, *overrides)), runs / f"{len(made)}.csv"
            folder = run_sft(parts, [MetricsFile(metrics)])
            with metrics.open(newline="") as file:
                made[overrides] = parts, folder, list(csv.DictReader(file))
        return made[overrides]

    return get


def report_of(parts, folder):
    backbone, head = load_backbone(parts, folder), ScalarHead(32)
    head.load_state_dict(load_file(folder / REWARD_HEAD))
    return evaluate_reward(parts, backbone, head, held_out_pairs(parts))


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def largest_change(one, other):
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def has_heads(folder):
    return [(path / REWARD_HEAD).is_file() for path in (folder, folder / REWARD_MODEL)]


def test_bytes_are_counted_once_for_both_passes(tmp_path):
    cfg = config(tmp_path, "sft.joint=false", "sft.n_steps=10", "sft.reward_steps=10")
    assert len(training_passes(cfg.sft)) == 2
    with patch.object(memory, "PassBytes", wraps=memory.PassBytes) as count:
        run_sft(Run(cfg), [])
    assert count.call_count == 1


def test_both_heads_learn_in_one_pass(sft_runs):
    parts, folder, rows = sft_runs()
    assert folder == sft_model_dir(parts.cfg)
    assert has_heads(folder) == [True, False]
    assert not (folder / REWARD_MODEL).exists()
    assert float(rows[-1]["lm_loss"]) < 0.5 * float(rows[0]["lm_loss"])
    assert report_of(parts, folder).pair_accuracy > 0.9


def test_a_reward_model_of_its_own_learns_after_the_lm(sft_runs):
    parts, folder, rows = sft_runs(*APART)
    assert has_heads(folder) == [False, True]
    assert (folder / REWARD_MODEL / "config.json").is_file()
    assert report_of(parts, folder / REWARD_MODEL).pair_accuracy > 0.9
    # an iteration is 10 steps: 12 of the LM, then 12 of the reward model
    assert [float(row["iteration"]) for row in rows] == list(range(1, 25))
    assert [bool(row["lm_loss"]) for row in rows] == [True] * 12 + [False] * 12
    assert [bool(row["reward_loss"]) for row in rows] == [False] * 12 + [True] * 12


def test_a_reward_model_of_its_own_leaves_the_lm_bit_for_bit(sft_runs):
    lm_only = weights(sft_runs(*PLAIN)[1])
    assert weights(sft_runs(*APART)[1]) == lm_only
    assert weights(sft_runs(*APART)[1] / REWARD_MODEL) != lm_only
    assert weights(sft_runs()[1]) != lm_only


def test_a_reward_model_of_its_own_starts_from_the_finished_lm(sft_runs):
    _, folder, _ = sft_runs(*APART, "sft.reward_steps=1", "sft.n_warmup_steps=100")
    _, untrained, _ = sft_runs(*PLAIN, "sft.n_steps=1", "sft.n_warmup_steps=100")
    # Adam's first step moves no weight by more than the learning rate, here 5e-3 / 100, but for weight decay.
    assert 0 < largest_change(folder / REWARD_MODEL, folder) < 6e-5
    assert largest_change(folder / REWARD_MODEL, untrained) > 1e-2


def test_without_pairs_there_is_no_reward_head(sft_runs):
    _, folder, rows = sft_runs(*PLAIN)
    assert has_heads(folder) == [False, False]
    assert float(rows[-1]["lm_loss"]) < 0.5 * float(rows[0]["lm_loss"])
    assert "reward_loss" not in rows[0]


def test_a_ranking_loss_of_no_weight_is_plain_fine_tuning(sft_runs):
    _, folder, _ = sft_runs(*UNWEIGHTED)
    assert has_heads(folder) == [False, False]
    assert weights(folder) == weights(sft_runs(*PLAIN)[1])


@pytest.mark.slow
def test_without_pairs_the_weight_of_their_loss_is_irrelevant(sft_runs):
    assert weights(sft_runs(*PLAIN, "sft.reward_weight=7")[1]) == weights(sft_runs(*PLAIN)[1])
    assert weights(sft_runs("sft.reward_weight=7")[1]) != weights(sft_runs()[1])


def test_every_sft_config_has_its_own_folder(sft_runs):
    made = [sft_runs(*way) for way in ([], APART, PLAIN, UNWEIGHTED)]
    assert len({folder for _, folder, _ in made}) == 4
    for parts, folder, _ in made:
        saved = json.loads((folder / SFT_DONE).read_text())["config"]
        assert saved["joint"] == parts.cfg.sft.joint
        assert (folder / "tokenizer.json").is_file()
    assert not list(made[0][1].parent.glob(".*"))


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupted_sft_leaves_no_files(tmp_path, at):
    # 2 iterations of the LM and 2 of the reward model
    parts = Run(config(tmp_path, *APART, "sft.n_steps=20"))
    with pytest.raises(KeyboardInterrupt):
        run_sft(parts, [Fails(at)])
    assert not list(tmp_path.rglob("*"))[1:]


@pytest.mark.parametrize(
    "way", [[], slow(APART), slow(["sft.on_policy_pairs.n_prompts=32", "sft.on_policy_pairs.n_steps=20"])]
)
@pytest.mark.parametrize("at", [slow(2), 4])
def test_an_interrupted_sft_resumes_bit_for_bit(tmp_path, way, at):
    # Two iterations of each pass; the joint one alone has four.
    options = [*way, "sft.n_steps=20" if way else "sft.n_steps=40", "sft.steps_per_iteration=10"]
    straight = run_sft(Run(config(tmp_path / "straight", *options)), [])
    parts = Run(config(tmp_path / "cut", *options))

    def stage():
        return SFTStage(parts, tmp_path / "work", every=1)

    with pytest.raises(KeyboardInterrupt):
        stage().train([Fails(at)])
    assert stage().resumed_at == {2: 1, 4: 3}[at]
    cut = stage().train([])
    assert weights_of(cut) == weights_of(straight)
    assert not (tmp_path / "work").exists()


class AsksToEnd(RLCallback):
    """A signal arrives while an iteration reports."""

    def __init__(self, interruption, at):
        self.interruption = interruption
        self.at = at

    def on_iteration_end(self, iteration, n_iterations, metrics):
        if iteration == self.at:
            self.interruption.signal = signal.SIGTERM


def test_a_signal_in_the_last_iteration_of_a_pass_loses_none_of_it(tmp_path):
    options = [*PLAIN, "sft.n_steps=20", "sft.steps_per_iteration=10"]
    straight = run_sft(Run(config(tmp_path / "straight", *options)), [])
    parts = Run(config(tmp_path / "cut", *options))
    stage = SFTStage(parts, tmp_path / "work", every=50)
    with pytest.raises(InterruptedRunError):
        stage.train([AsksToEnd(parts.interruption, at=2)])
    parts.interruption = Interruption()
    resumed, log = SFTStage(parts, tmp_path / "work", every=50), MetricsFile(tmp_path / "metrics.csv")
    assert (resumed.first, resumed.resumed_at) == (0, 2)
    assert weights_of(resumed.train([log])) == weights_of(straight)
    assert log.history == []


SCORED = ["experiment=shadow", "cache.policy=learned", "cache.budget=7", "cache.window=2"]
SCORED += ["sft.n_steps=20", "sft.steps_per_iteration=10"]


@pytest.mark.parametrize("way", [[], slow(APART)])
def test_a_scorer_of_evictions_starts_after_the_lm_and_leaves_it_bit_for_bit(tmp_path, way):
    way = [*SCORED, *way, *(["sft.reward_steps=20"] if way else [])]
    plain = run_sft(Run(config(tmp_path / "plain", *way)), [])
    parts = Run(config(tmp_path / "started", *way, "sft.eviction_steps=20"))
    started = run_sft(parts, [])
    assert weights(started) == weights(plain)
    assert not (plain / KV_SCORER_FILE).exists()
    scorer = load_file(started / KV_SCORER_FILE)
    assert all(float(scorer[f"layers.{layer}.out"].abs().max()) > 0 for layer in (0, 1))
    roles = make_roles(parts, started)  # as RL begins
    begun = kv_scorer_of(roles.backbone("policy"))
    assert all(torch.equal(begun.state_dict()[name], each) for name, each in scorer.items())
    if not way[len(SCORED) :]:
        return
    assert weights(started / REWARD_MODEL) == weights(plain / REWARD_MODEL)


def test_the_start_of_a_scorer_is_resumed_bit_for_bit(tmp_path):
    options = [*SCORED, "sft.eviction_steps=30"]
    straight = run_sft(Run(config(tmp_path / "straight", *options)), [])
    parts = Run(config(tmp_path / "cut", *options))

    def stage():
        return SFTStage(parts, tmp_path / "work", every=1)

    with pytest.raises(KeyboardInterrupt):
        stage().train([Fails(at=4)])
    assert stage().resumed_at == 3
    cut = stage().train([])
    assert (cut / KV_SCORER_FILE).read_bytes() == (straight / KV_SCORER_FILE).read_bytes()
    assert weights_of(cut) == weights_of(straight)


def test_a_finished_pass_is_not_trained_again(tmp_path):
    options = [*APART, "sft.n_steps=20", "sft.reward_steps=20", "sft.steps_per_iteration=10"]
    straight = run_sft(Run(config(tmp_path / "straight", *options)), [])
    parts = Run(config(tmp_path / "cut", *options))

    def stage():
        return SFTStage(parts, tmp_path / "work", every=50)  # no checkpoint before the end of a pass

    with pytest.raises(KeyboardInterrupt):
        stage().train([Fails(at=3)])
    resumed = stage()
    assert (resumed.first, resumed.resumed_at, resumed.resumed) == (1, 2, None)
    assert weights_of(resumed.train([])) == weights_of(straight)


def weights_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize(
    ("task", "says"),
    [(Forgiving(), "task: Forgiving must score the two sides"), (LongWinded(), "has positions for 1024")],
)
@pytest.mark.parametrize("way", [[], APART])
def test_pairs_that_cannot_be_learned_from_are_refused_before_training(tmp_path, task, says, way):
    parts = Run(config(tmp_path, *way))
    parts.task = task
    with pytest.raises(ConfigError, match=says):
        run_sft(parts, [Fails(at=1)])


def test_plain_fine_tuning_does_not_check_rejected_completions(tmp_path):
    parts = Run(config(tmp_path, *PLAIN, "sft.n_steps=10"))
    parts.task = Forgiving()
    assert (run_sft(parts, []) / SFT_DONE).is_file()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sft.n_pairs=0", "sft.joint=false"], "but sft.n_pairs=0 gives it nothing to learn from"),
        (["sft.n_pairs=-1"], "sft.n_pairs must be a whole number of at least 0, got -1"),
        (["sft.n_warmup_steps=x"], "sft.n_warmup_steps must be a whole number of at least 0, got x"),
        (["sft.reward_steps=0"], "sft.reward_steps must be a whole number of at least 1, got 0"),
        (["sft.joint=1"], "sft.joint must be true or false, got 1"),
        (["sft.joint=false", "sft.reward_steps=15"], "sft.reward_steps must be a multiple of"),
        (["cache.policy=learned", "sft.eviction_steps=55"], "sft.eviction_steps must be a multiple of"),
        (["sft.on_policy_pairs.reward_weight=0"], "reward_weight must be a number above 0, got 0"),
        (["sft.reward_weight=-1"], "sft.reward_weight must be a number of at least 0, got -1"),
    ],
)
def test_a_mistake_in_the_config_is_refused(tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        config(tmp_path, *overrides)


def test_reward_steps_are_not_checked_where_no_reward_model_is_trained(tmp_path):
    assert config(tmp_path, "sft.reward_steps=15").sft.joint


def test_a_reward_head_is_judged_on_the_pairs_of_held_out_problems(sft_runs):
    parts, folder, _ = sft_runs()
    problems = PromptSource(parts.task, split="eval", seed=parts.cfg.seed).take(100)
    pairs = held_out_pairs(parts)
    assert pairs == held_out_pairs(parts)
    assert [pair.prompt for pair in pairs] == [problem.prompt for problem in problems]
    assert {split_of(pair.prompt) for pair in pairs} == {"eval"}
    for side, score in (("chosen", 1.0), ("rejected", 0.0)):
        completions = [getattr(pair, side) for pair in pairs]
        assert {parts.task.score(*both) for both in zip(problems, completions, strict=True)} == {score}
    assert report_of(parts, folder).n_pairs == 100


def test_an_untrained_reward_head_ranks_nothing(sft_runs):
    parts, folder, _ = sft_runs()
    report = evaluate_reward(parts, load_backbone(parts, folder), ScalarHead(32), held_out_pairs(parts))
    assert (report.pair_accuracy, report.margin_mean, report.calibration_error) == (0.0, 0.0, 0.0)


def test_a_finite_task_is_not_asked_for_more_pairs_than_it_has(tmp_path):
    problems = [{"prompt": f"{n}+0=", "answer": f"{n}"} for n in range(40)]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, problems)))
    parts = Run(parsed(tmp_path, "task=jsonl", f"task.path={path}"))
    n_held_out = sum(split_of(problem["prompt"]) == "eval" for problem in problems)
    assert 0 < n_held_out < parts.cfg.evaluation.n_prompts
    assert len(held_out_pairs(parts)) == n_held_out


@pytest.mark.slow
def test_preferences_without_a_verifier_train_a_reward_head_too(tmp_path):
    # any two digits: the one with more straight lines, 1 4 7, was preferred
    rows = [{"prompt": f"{n}?", "chosen": "147"[n % 3], "rejected": "03689"[n % 5]} for n in range(100)]
    path = tmp_path / "preferences.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    parts = Run(parsed(tmp_path, "task=preferences", "reward=learned", f"task.path={path}"))
    assert report_of(parts, run_sft(parts, [])).pair_accuracy == 1.0


def preferences(folder, n=100, **last):
    """A file of pairs and a last one, and the parts of a run on it."""
    rows = [{"prompt": f"{index}?", "chosen": "1", "rejected": "0"} for index in range(n)]
    path = folder / "preferences.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, [*rows, {"prompt": "?", "chosen": "1", "rejected": "0"} | last]))
    )

    def parts(*overrides):
        return Run(parsed(folder, "task=preferences", "reward=learned", f"task.path={path}", *overrides))

    return parts


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_too_long_for_the_model_is_named_however_far_down(tmp_path, side):
    parts = preferences(tmp_path, n=2000, **{side: "1" * 1024})(
        "sft.n_steps=20", "sft.steps_per_iteration=10"
    )
    with pytest.raises(ConfigError, match=r"has positions for 1024.*preferences\.jsonl:2001 \(1026 tokens\)"):
        run_sft(parts, [Fails(at=1)])


def test_plain_fine_tuning_does_not_check_the_length_of_rejected_completions(tmp_path):
    own = tmp_path / "rewards.py"
    own.write_text("def by_length(completion, **_):\n    return len(completion)\n")
    reward = ("reward=python", f"reward.functions.custom.path={own}:by_length")
    parts = preferences(tmp_path, rejected="1" * 1024)(*PLAIN, "sft.n_steps=10", *reward)
    assert (run_sft(parts, []) / SFT_DONE).is_file()


def test_sft_begins_anew_with_other_rows_and_resumes_with_its_own(tmp_path):
    def stage(parts):
        return SFTStage(parts("sft.n_steps=20"), tmp_path / "work", every=1)

    with pytest.raises(KeyboardInterrupt):
        stage(preferences(tmp_path)).train([Fails(at=2)])
    assert stage(preferences(tmp_path, n=101)).resumed_at == 0


def test_progress_of_the_judgement_is_shown(sft_runs, capfd):
    parts, folder, _ = sft_runs()
    report_of(parts, folder)
    assert "reward 100/100" in capfd.readouterr().err


def test_sft_reads_the_prompts_that_the_environment_extends(tmp_path):
    with trusting(["tests"]):
        plain, talking = (Run(config(tmp_path, "stages=[sft]", *options)) for options in ([], COUNTING))
    texts = []
    for context in (plain, talking):
        stage = training_passes(context.cfg.sft)[0]
        chosen = pass_data(context, stage, context.task).next_batch().chosen
        is_prompt = chosen.attention_mask & (~chosen.is_target)
        texts.append(
            [
                context.tokenizer.decode(row[mask])
                for row, mask in zip(chosen.input_ids, is_prompt, strict=True)
            ]
        )
    # Counter appends a question mark.
    assert texts[1] == [f"{text}?" for text in texts[0]]
