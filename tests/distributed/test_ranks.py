"""Whole runs on several processes: the same numbers as on one, and nobody is left waiting."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lit_rlkv.config import ConfigError
from lit_rlkv.runs.checks import check_shares
from lit_rlkv.trust import trusting
from tests.distributed.rank_runs import RESAMPLED, SETTINGS, SYNC, rows_of, weights_of
from tests.saved_models import save_checkpoint
from tests.tiers import slow
from tests.whole_runs import config, run, run_on_ranks

DIAGNOSTICS = "lit_rlkv.callbacks"
GRADIENT = f"{{_target_:{DIAGNOSTICS}.gradient_variance.GradientVariance,every:2}}"
COUNTERFACTUAL = (
    f"{{_target_:{DIAGNOSTICS}.gradient_sources.GradientSources,every:2,counterfactual:sparse_rl}}"
)
LOOKED_AT = [
    f"+diagnostics.mismatch={{_target_:{DIAGNOSTICS}.mismatch.DenseMismatch,every:2,n_rows:7}}",
    f"+diagnostics.layers={{_target_:{DIAGNOSTICS}.mismatch.LayerMismatch,n_rows:1}}",  # of one rank alone
    f"+diagnostics.cache={{_target_:{DIAGNOSTICS}.cache_statistics.CacheStatistics}}",
]


LISTED = ["task=jsonl", "task.path=tests/data/sums.jsonl", "~task.n_terms"]
"""A list of problems, which return."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        slow("grpo", ["algorithm.kl.weight=0.1"]),
        # A response at a time, and so more micro-batches than a rank has prompts.
        slow(
            "minibatches", ["algorithm.n_minibatches=2", "algorithm.n_epochs=2", "fabric.tokens_per_pass=1"]
        ),
        # Ranks with fewer long responses must have as many passes.
        ("passes", ["algorithm.n_minibatches=2", "fabric.tokens_per_pass=48"]),
        slow(
            "normalised", ["algorithm=reinforce++", "reward.normalize=batch", "algorithm.aggregation=token"]
        ),
        slow("sampling_masks", ["rollout.top_k=20", "rollout.top_p=0.9", "fabric.tokens_per_pass=48"]),
        slow("sparse_rl", ["experiment=sparse_rl", "reward.normalize=running"]),
        slow("ppo", ["algorithm=ppo", "algorithm.n_minibatches=2", "algorithm.kl.target=1.0"]),
        slow("variance", [f"+diagnostics.gradient={GRADIENT}", "experiment=tis"]),
        slow("counterfactual", [f"+diagnostics.gradient_sources={COUNTERFACTUAL}", "experiment=shadow"]),
        slow("diagnostics", LOOKED_AT),
        slow("critic_warmup", ["algorithm=ppo", "algorithm.critic_warmup=2", "optimizer.weight_decay=0.1"]),
        slow("joint_warmup", ["experiment=j_hydra_ppo", "algorithm.critic_warmup=2"]),
        slow("target_kl", ["algorithm=ppo", "algorithm.n_minibatches=4", "algorithm.loss.target_kl=1e-3"]),
        slow("online_dpo", ["algorithm=online_dpo", "algorithm.n_minibatches=2"]),
        slow("remax", ["algorithm=remax", "algorithm.n_minibatches=2"]),
        slow("curriculum", [*LISTED, "algorithm.curriculum.decay=0.5"]),
        slow("teacher", ["distillation=teacher", "distillation.model=FOLDER/a-teacher"]),
        slow("reference_sync", [*SYNC, "algorithm.n_minibatches=2"]),
    ],
)
def test_two_ranks_equal_one_process_with_two_shards(folder, name, options):
    if name == "teacher":
        save_checkpoint(folder / "a-teacher")
    options = [option.replace("FOLDER", str(folder)) for option in options]
    run(folder, name, *SETTINGS, *options, "rollout.n_shards=2")
    run_on_ranks(folder, f"{name}-two", 2, *SETTINGS, *options)
    one, two = rows_of(folder / name), rows_of(folder / f"{name}-two")
    assert len(one) == 3
    assert len({row["loss"] for row in one}) > 1
    assert max(row["grad_norm"] for row in one) > 1e-3
    for ours, theirs in zip(one, two, strict=True):
        # The gap is rounding alone, which depends on the rows of a pass.
        assert max(row.pop("kv/replay_gap", 0.0) for row in (ours, theirs)) < 1e-5
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7)
    weights = weights_of(folder / f"{name}-two")
    for parameter, value in weights_of(folder / name).items():
        # Norms and rotations of transformers are float32 here too, and a step of AdamW moves by up to 1e-3.
        torch.testing.assert_close(value, weights[parameter], rtol=1e-6, atol=1e-7)


def test_the_same_shards_give_the_same_numbers_on_one_two_and_three_processes(folder, sft_model):
    options = [*SETTINGS, *RESAMPLED, f"model.path={sft_model}"]
    with trusting(["tests"]):
        run(folder, "on-1", *options)
        for n in (2, 3):
            run_on_ranks(folder, f"on-{n}", n, *options)
    one, *others = (rows_of(folder / f"on-{n}") for n in (1, 2, 3))
    assert len({name for row in one for name in row if name.startswith("lengths/")}) > 2
    assert max(row["rollout/rounds"] for row in one) > 1
    assert len({row["kv/budget"] for row in one}) > 1
    for other in others:
        for ours, theirs in zip(one, other, strict=True):
            # The gap is rounding alone, which depends on the rows of a pass.
            assert theirs.pop("kv/replay_gap") < 1e-5
            assert theirs == pytest.approx(
                {k: v for k, v in ours.items() if k != "kv/replay_gap"}, 1e-5, 1e-7
            )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_ranks_train_in_half_precision(folder, sft_model, precision):
    options = [*SETTINGS, f"fabric.precision={precision}", "algorithm.n_iterations=1", "stages=[rl]"]
    run_on_ranks(folder, precision, 2, *options, f"model.path={sft_model}")
    (row,), (other,) = rows_of(folder / precision), rows_of(folder / precision / "ranks" / "1")
    assert row["skipped_steps"] == 0
    assert row["grad_norm"] > 1e-3
    assert [row[name] for name in ("loss", "grad_norm", "reward")] == [
        other[name] for name in ("loss", "grad_norm", "reward")
    ]


@pytest.mark.slow
def test_other_shards_are_other_responses(folder):
    run(folder, "alone", *SETTINGS, "rollout.n_shards=1")
    run(folder, "shards", *SETTINGS, "rollout.n_shards=2")
    alone, shards = rows_of(folder / "alone"), rows_of(folder / "shards")
    assert alone[0]["loss"] != shards[0]["loss"]


@pytest.mark.slow
def test_sft_on_two_ranks_gives_the_model_of_one(tmp_path):
    options = [*SETTINGS, "stages=[sft]", "sft.n_steps=10", "sft.n_warmup_steps=1"]
    run(tmp_path / "one", "run", *options)
    run_on_ranks(tmp_path / "two", "run", 2, *options)
    run(tmp_path / "other", "run", *options, "sft.seed=1")
    one, two, other = (
        load_file(next((tmp_path / name / "sft_models").iterdir()) / "model.safetensors")
        for name in ("one", "two", "other")
    )
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-6, atol=1e-9)
    embedding = "model.embed_tokens.weight"
    with pytest.raises(AssertionError):  # twin: other problems
        torch.testing.assert_close(one[embedding], other[embedding], rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_an_evaluation_on_two_ranks_equals_that_of_one(folder):
    options = [*SETTINGS, "stages=[eval]", "evaluation.batch_size=8", "evaluation.n_prompts=20"]
    run(folder, "scored", *options)
    run_on_ranks(folder, "scored-by-two", 2, *options)
    one, two = (
        json.loads((folder / name / "evaluation.json").read_text()) for name in ("scored", "scored-by-two")
    )
    assert one["after"] == two["after"]
    assert one["after"][0]["n_problems"] == 20


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("rollout.n_prompts=7", "rollout.n_prompts=7 cannot be divided evenly over 2"),
        ("rollout.n_shards=1", "rollout.n_shards=1 cannot be divided evenly over 2 processes"),
        ("algorithm.n_minibatches=9", "n_minibatches=9 cannot be cut from 8 responses of each of 2 shards"),
        ("pairs", "n_minibatches=5 cannot be cut from 4 pairs of each of 2 shards"),
        ("sft.batch_size=33", "sft.batch_size=33 cannot be divided evenly over 2"),
    ],
)
def test_work_that_does_not_divide_by_the_ranks_is_refused(tmp_path, option, says):
    options = ["algorithm=online_dpo", "algorithm.n_minibatches=5"] if option == "pairs" else [option]
    cfg = config(tmp_path, *SETTINGS, *options)
    with pytest.raises(ConfigError, match=says):
        check_shares(cfg, 2)
    check_shares(cfg, 1)
