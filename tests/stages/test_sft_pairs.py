"""Pairs against a model's own wrong answers."""

from dataclasses import replace
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from lit_rlkv.config import ConfigError
from lit_rlkv.data.prompts import PromptSource, split_of
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.rewards import RewardManager
from lit_rlkv.runs.policy import load_backbone
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import REWARD_HEAD, REWARD_MODEL, sft_model_dir
from lit_rlkv.stages.sft import run_sft
from lit_rlkv.stages.sft_passes import WrongAnswers, on_policy_preference_pairs, training_passes
from lit_rlkv.tasks import ChainSum
from lit_rlkv.tasks.preferences import Preferences
from lit_rlkv.tasks.rows import Table
from lit_rlkv.types import PreferencePair
from tests.rewards.helpers import InThreads
from tests.whole_runs import MODEL, composed

TINY = [*MODEL, "experiment=none", "rollout.max_new_tokens=16"]


class Generous(ChainSum):
    """Nothing is wrong."""

    def score(self, problem, completion):
        return 1.0


def config(folder, *overrides):
    return checked_config(composed(*TINY, f"runs_dir={folder}", *overrides))


def test_each_pair_prefers_the_solution_to_a_wrong_answer_of_the_model(tmp_path):
    parts = Run(config(tmp_path))
    backbone = load_backbone(parts, None)
    found = on_policy_preference_pairs(parts, backbone, 40, seed=0)
    assert 20 < len(found) <= 40
    for index in range(len(found)):
        problem = found.at(index)
        assert split_of(problem.prompt) == "train"
        judged = replace(problem, answer=problem.solution.rpartition(",")[2])
        assert parts.task.score(judged, problem.solution) == 1.0
        rejected = found.corrupt(problem, Random(0))
        assert parts.task.score(judged, rejected) == 0.0
        assert "<pad>" not in rejected
    again = on_policy_preference_pairs(parts, backbone, 40, seed=0)
    assert [again.at(i) for i in range(len(again))] == [found.at(i) for i in range(len(found))]
    other = on_policy_preference_pairs(parts, backbone, 40, seed=1)
    assert other.at(0) != found.at(0)
    parts.cfg = replace(parts.cfg, evaluation=replace(parts.cfg.evaluation, batch_size=8))
    in_batches = on_policy_preference_pairs(parts, backbone, 40, seed=0)
    assert [in_batches.at(i) for i in range(len(in_batches))] != [found.at(i) for i in range(len(found))]


def test_ranks_share_the_prompts_and_get_the_pairs_of_one_process(tmp_path, monkeypatch):
    parts = Run(config(tmp_path, "evaluation.batch_size=8"))
    backbone, sent = load_backbone(parts, None), {}

    class Rank(Ranks):
        size = 2

        def __init__(self, rank):
            self.rank = rank

        def all_gather_object(self, values):
            sent[self.rank] = list(values)
            return [value for rank in sorted(sent) for value in sent[rank]]

    def pairs_of(ranks):
        monkeypatch.setattr(Run, "ranks", ranks)
        found = on_policy_preference_pairs(parts, backbone, 36, seed=0)
        return [(found.at(index), found.rejected(index)) for index in range(len(found))]

    alone = pairs_of(Ranks())
    pairs_of(Rank(1))
    assert pairs_of(Rank(0)) == alone
    assert [[start for start, _ in sent[rank]] for rank in (0, 1)] == [[0, 16, 32], [8, 24]]


def judge(question):
    """Right if it begins with a plus, failed if with a two."""
    return {"+": 1.0, "2": float("nan")}.get(question["completion"][:1], 0.0)


def test_every_wrong_answer_is_trained_on_whatever_split_its_prompt_would_fall_into():
    pairs = [PreferencePair(f"{n}+1=", f"{n + 1}", "0") for n in range(40)]
    assert {split_of(pair.prompt) for pair in pairs} == {"train", "eval"}
    table = Table("pairs", pairs, [f"pair {n}" for n in range(40)])
    assert PromptSource(WrongAnswers(table), split="train", seed=0).size == 40
    assert PromptSource(Preferences(table), split="train", seed=0).size < 40


class WithoutCorruptions(ChainSum):
    """A task that ranks nothing itself."""

    def corrupt(self, problem, rng):
        raise NotImplementedError


def test_a_task_need_not_corrupt_solutions_where_the_model_makes_the_mistakes(tmp_path):
    cfg = config(tmp_path, "sft.n_pairs=0", "sft.on_policy_pairs.n_prompts=16", "sft.n_steps=10")
    parts = Run(cfg)
    parts.task = WithoutCorruptions()
    assert (run_sft(parts, []) / REWARD_HEAD).is_file()


def test_right_and_unscored_answers_are_no_rejected_sides(tmp_path):
    parts = Run(config(tmp_path))
    backbone = load_backbone(parts, None)

    def beginnings():
        found = on_policy_preference_pairs(parts, backbone, 80, seed=0)
        return [found.corrupt(found.at(index), Random(0))[:1] for index in range(len(found))]

    every = beginnings()
    assert {"+", "2"} < set(every)
    parts.cfg = replace(parts.cfg, reward=replace(parts.cfg.reward, accuracy="judge"))
    with RewardManager({"judge": InThreads(ask=judge)}) as parts.rewards:
        assert beginnings() == [first for first in every if first not in ("+", "2")]


def test_another_cache_or_batch_size_is_another_sft_model_with_on_policy_pairs(tmp_path):
    def folder(*overrides):
        return sft_model_dir(config(tmp_path, *overrides))

    asked = "sft.on_policy_pairs.n_prompts=32"
    assert folder(asked) != folder(asked, "cache.budget=12") != folder(asked, "rollout.temperature=0.5")
    assert folder(asked) != folder(asked, "evaluation.batch_size=8")
    assert folder(asked) != folder(asked, "reward=numeric")  # another judge
    assert (
        folder() == folder("cache.budget=12") == folder("evaluation.batch_size=8") == folder("reward=numeric")
    )
    assert folder() != folder(asked)


def test_another_judge_in_the_same_file_is_another_sft_model_with_on_policy_pairs(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("def judge(completion, answer):\n    return 1.0\n")
    judged = ["reward=python", f"reward.functions.custom.path={file}:judge", "reward.accuracy=custom"]
    asked = [*judged, "sft.on_policy_pairs.n_prompts=32"]
    before = [sft_model_dir(config(tmp_path, *options)) for options in (judged, asked)]
    file.write_text("def judge(completion, answer):\n    return 0.0\n\n")
    after = [sft_model_dir(config(tmp_path, *options)) for options in (judged, asked)]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_a_model_without_mistakes_is_refused(tmp_path):
    parts = Run(config(tmp_path))
    object.__setattr__(parts, "task", Generous())
    with pytest.raises(ConfigError, match="answered all of them correctly"):
        on_policy_preference_pairs(parts, load_backbone(parts, None), 8, seed=0)


def test_answers_that_find_too_little_memory_say_what_to_lower(tmp_path):
    window = ["cache.policy=snapkv", f"cache.window={2**30}", f"cache.budget={2**31 - 1}"]
    parts = Run(config(tmp_path, *window, "evaluation.budgets=[]"))
    says = r"the SFT model answers 8 prompts at a time; lower evaluation\.batch_size=\d+ or rollout"
    with pytest.raises(MemoryExhaustedError, match=says):
        on_policy_preference_pairs(parts, load_backbone(parts, None), 8, seed=0)


def test_the_last_pass_moves_the_head_of_the_first(tmp_path):
    without = run_sft(Run(config(tmp_path)), [])
    cfg = config(tmp_path, "sft.on_policy_pairs.n_prompts=32")
    first, last = training_passes(cfg.sft)
    assert (last.lm_weight, last.reward_weight, last.n_pairs) == (1.0, 1.0, cfg.sft.batch_size)
    folder = run_sft(Run(cfg), [])
    before, after = (load_file(path / REWARD_HEAD)["linear.weight"] for path in (without, folder))
    assert not torch.equal(before, after)
    assert first.n_answered == 0


@pytest.mark.slow
def test_apart_the_reward_model_alone_learns_from_them(tmp_path):
    plain = run_sft(Run(config(tmp_path, "sft.joint=false")), [])
    folder = run_sft(Run(config(tmp_path, "sft.joint=false", "sft.on_policy_pairs.n_prompts=32")), [])
    policy, critic = (load_file(folder / name / "model.safetensors") for name in (".", REWARD_MODEL))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(policy[name], load_file(plain / "model.safetensors")[name])
    assert not torch.equal(critic[name], load_file(plain / REWARD_MODEL / "model.safetensors")[name])
