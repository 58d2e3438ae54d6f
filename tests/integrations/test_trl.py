"""The trainers of TRL that evict: TRL's own losses without evictions, and exact replay with them."""

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lit_rlkv.integrations.trl import EvictingGRPOTrainer, EvictingRLOOTrainer
from tests.integrations.trl_runs import (
    IN_TWO_PARTS,
    KEEPS_ALL,
    PROMPTS,
    TWICE,
    Recorder,
    train,
    train_plain,
)
from tests.tiers import slow

SAME = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length")
TRAINERS = [EvictingGRPOTrainer, EvictingRLOOTrainer]
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def lora():
    return LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")


def distance(one, other):
    """Return the distance of the weights of two trainers, relative to their norm."""
    one, other = (torch.cat([p.detach().flatten() for p in each.model.parameters()]) for each in (one, other))
    return float((one - other).norm() / other.norm())


def largest_gap(rows):
    return max(row["kv/replay_gap"] for row in rows if "kv/replay_gap" in row)


@pytest.mark.parametrize(
    "options",
    [
        *[slow({"loss_type": kind}) for kind in LOSS_TYPES if kind != "vespo"],
        {"loss_type": "vespo"},
        slow({}),
        slow(IN_TWO_PARTS),
        {"beta": 0.1} | TWICE,
        slow({"importance_sampling_level": "sequence", "loss_type": "grpo"} | TWICE),
        slow({"gradient_checkpointing": False, "temperature": 0.7}),
        slow({"steps_per_generation": 2, "per_device_train_batch_size": 4}),
        slow({"mask_truncated_completions": True}),
        {"mask_truncated_completions": True, "max_completion_length": 1},  # no token of the batch counts
        *[{"trainer": EvictingRLOOTrainer} | options for options in ({}, TWICE)],
        slow({"trainer": EvictingRLOOTrainer, "beta": 0.0}),
        slow({"trainer": EvictingRLOOTrainer, "normalize_advantages": True, "temperature": 0.7}),
        slow({"trainer": EvictingRLOOTrainer, "mask_truncated_completions": True}),
        slow({"trainer": EvictingRLOOTrainer} | IN_TWO_PARTS),
    ],
    ids=str,
)
def test_a_budget_that_evicts_nothing_gives_the_losses_of_trl(model, tmp_path, caplog, options):
    recorder = Recorder()
    ours, rows = train(model, tmp_path, reward=recorder, **KEEPS_ALL | options)
    plain, plain_rows = train_plain(model, tmp_path, recorder, **options)
    assert len(rows) == len(plain_rows) >= 3
    for row, expected in zip(rows, plain_rows, strict=True):
        for name in {*SAME, "kl"} & set(expected):
            assert row[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name
        assert set(expected) <= set(row)
    assert distance(ours, plain) < 1e-4
    assert {row["kv/affected_rows"] for row in rows if "kv/affected_rows" in row} == {0.0}
    assert caplog.text.count("nothing was evicted in the first rollout") == 1
    assert "lower the budget, or use cache_policy=dense" in caplog.text


@pytest.mark.parametrize("trainer", TRAINERS)
def test_with_evictions_trl_alone_has_other_losses(model, tmp_path, trainer):
    recorder = Recorder()
    ours, rows = train(model, tmp_path, trainer=trainer, reward=recorder)
    plain, plain_rows = train_plain(model, tmp_path, recorder, trainer=trainer)
    assert rows[0]["grad_norm"] != pytest.approx(plain_rows[0]["grad_norm"], rel=1e-2)
    assert distance(ours, plain) > 1e-2


@pytest.mark.parametrize("policy", ["snapkv", slow("h2o"), slow("streaming"), "random"])
def test_the_learner_replays_what_the_sampler_saw(model, tmp_path, caplog, policy):
    _, rows = train(model, tmp_path, cache_policy=policy)
    assert len(rows) == 3
    assert all(0 < row["kv/affected"] <= row["kv/affected_rows"] <= 1 for row in rows)
    assert "nothing was evicted" not in caplog.text
    assert all(row["kv/replay_gap"] < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("trainer", "correction"),
    [
        (EvictingGRPOTrainer, "naive"),
        slow(EvictingGRPOTrainer, "tis"),
        slow(EvictingGRPOTrainer, "mis"),
        (EvictingRLOOTrainer, "naive"),
    ],
)
def test_without_the_shadow_the_gap_is_far_above(model, tmp_path, trainer, correction):
    _, rows = train(model, tmp_path, trainer=trainer, correction=correction)
    assert all(row["kv/replay_gap"] > 0.1 for row in rows)


def test_replay_keeps_every_sequence_under_a_tight_off_policy_mask(model, tmp_path):
    def first_grad_norm(**options):
        return train(model, tmp_path, max_steps=1, **options)[1][0]["grad_norm"]

    mask = {"off_policy_mask_threshold": 1e-5}
    assert first_grad_norm(**mask) == pytest.approx(first_grad_norm(), rel=1e-5)
    dense = {"correction": "naive"}
    assert first_grad_norm(**mask, **dense) != pytest.approx(first_grad_norm(**dense), rel=1e-2)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("options", [IN_TWO_PARTS, TWICE, {"steps_per_generation": 2}], ids=str)
def test_the_gap_is_measured_before_the_first_update_on_a_rollout(model, tmp_path, trainer, options):
    _, rows = train(model, tmp_path, trainer=trainer, **options)
    measured = [row for row in rows if "kv/replay_gap" in row]
    n_rollouts = len(rows) if options is IN_TWO_PARTS else (len(rows) + 1) // 2
    assert len(measured) == n_rollouts
    assert largest_gap(measured) < 1e-4


def test_an_evaluation_between_steps_does_not_change_what_is_measured(model, tmp_path):
    """At step 1 a rollout of the evaluation is new, while the training batch is from before an update."""
    trainer, rows = train(
        model,
        tmp_path,
        arguments={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})},
        eval_strategy="steps",
        eval_steps=1.0,
        per_device_eval_batch_size=8,
        **TWICE,
    )
    assert largest_gap(rows) < 1e-4
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluations) == 4
    assert all(row["eval_kv/replay_gap"] < 1e-4 for row in evaluations)


@pytest.mark.parametrize("peft_config", [None, lora()], ids=["full", "lora"])
def test_the_reference_replays_too(model, tmp_path, peft_config):
    # Before the first update the reference is the policy, so that their KL under the same keys is 0.
    class DenseReference(EvictingGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self._replays = torch.is_grad_enabled()
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    options = {"beta": 0.1, "max_steps": 1, "arguments": {"peft_config": peft_config}}
    _, rows = train(model, tmp_path, **options)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-8)
    _, rows = train(model, tmp_path, trainer=DenseReference, **options)
    assert rows[0]["kl"] > 1e-4


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_adapter_and_its_reference_replay(model, tmp_path, trainer):
    found, rows = train(model, tmp_path, trainer=trainer, arguments={"peft_config": lora()}, beta=0.1)
    assert all(row["kv/replay_gap"] < 1e-4 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert abs(rows[-1]["kl"]) > 1e-5
    trained = dict(found.model.named_parameters())
    assert any("lora_B" in name and p.abs().max() > 0 for name, p in trained.items())


def test_a_peft_model_is_taken_as_it_is(model, tmp_path):
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora())
    _, rows = train(adapted, tmp_path, beta=0.1, max_steps=2)
    assert all(row["kv/replay_gap"] < 1e-4 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-8)


def test_an_adapter_without_evictions_has_the_losses_of_trl(model, tmp_path):
    recorder = Recorder()
    options = {"arguments": {"peft_config": lora()}, "beta": 0.1}
    _, rows = train(model, tmp_path, reward=recorder, **KEEPS_ALL | options)
    _, plain_rows = train_plain(model, tmp_path, recorder, **options)
    for row, expected in zip(rows, plain_rows, strict=True):
        for name in (*SAME, "kl"):
            assert row[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-3), name


def test_bfloat16_trains_and_its_gap_is_rounding(model, tmp_path):
    _, rows = train(model, tmp_path, bf16=True)
    _, dense_rows = train(model, tmp_path, bf16=True, cache_policy="dense")
    assert largest_gap(rows) < 3 * largest_gap(dense_rows) < 0.5


def test_the_cache_is_smaller_than_a_dense_one(model, tmp_path):
    _, rows = train(model, tmp_path, max_steps=1)
    _, dense_rows = train(model, tmp_path, max_steps=1, cache_policy="dense")
    assert rows[0]["kv/bytes"] < 0.6 * dense_rows[0]["kv/bytes"]
