"""The record through TRL's trainers: the learner takes the keys, tokens, codes and experts of the sampler."""

import pytest

pytest.importorskip("trl")

import torch
from transformers import AutoModelForCausalLM

from lit_rlkv.integrations.trl import EvictingGRPOTrainer, EvictingRLOOTrainer
from lit_rlkv.types import OWN_CHOICE
from tests.integrations.trl_runs import (
    IN_TWO_PARTS,
    KEEPS_ALL,
    TWICE,
    Recorder,
    Watched,
    build,
    completion_logits,
    kept_logits,
    tokenizer,
    train,
    train_plain,
)
from tests.memories import two_memories
from tests.models_zoo import build as build_network
from tests.models_zoo import tiny_config
from tests.rollouts import moved
from tests.tiers import short_tier

N_EXPERTS = 4
TOP_K, TOP_P, EXPERTS = {"top_k": 4}, {"top_p": 0.7}, {"replay_routing": True}
ALL_THREE = {"top_k": 6, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    vocabulary = tokenizer()
    sizes = {"vocab_size": len(vocabulary), "num_experts": N_EXPERTS, "moe_intermediate_size": 24}
    tokens = {"pad_token_id": vocabulary.pad_token_id, "eos_token_id": vocabulary.eos_token_id}
    network = build_network(tiny_config("qwen3_moe", **sizes, **tokens))
    folder = tmp_path_factory.mktemp("moe")
    network.save_pretrained(folder)
    return str(folder)


def other_experts(rollout):
    ids = rollout.record.expert_ids
    return rollout.with_record(expert_ids=torch.where(ids == OWN_CHOICE, ids, (ids + 1) % N_EXPERTS))


def spoiled(trainer, change):
    """Return the trainer with another record than the sampler's."""

    class Spoiled(trainer):
        def sample(self, prompt_ids):
            found = super().sample(prompt_ids)
            self._rollout = change(self._rollout)
            return found

    return Spoiled


PARTS = {
    "evictions": ({}, moved),
    "kept tokens": (ALL_THREE, lambda rollout: rollout.with_record(sampling_masks=None)),
    "codes": ({"cache_dtype": "int4"}, lambda rollout: rollout.with_record(codes=None)),
    "experts": (EXPERTS, other_experts),
}
"""Options with which a part is recorded, and a record that is wrong."""
OPTIONS = [
    {},
    {"beta": 0.1},
    IN_TWO_PARTS,
    TWICE,
    {"steps_per_generation": 2, "per_device_train_batch_size": 4},
    {"mask_truncated_completions": True, "max_completion_length": 60},
    {"pad_to_multiple_of": 8},
    {"gradient_checkpointing": False},
    {"model_init_kwargs": {"output_router_logits": True}, "beta": 0.1},
]
TRAINERS = [EvictingGRPOTrainer, EvictingRLOOTrainer]
SHORT = [(part, number, EvictingGRPOTrainer) for number, part in enumerate(PARTS)]
CASES = [
    *SHORT,
    *(
        ("experts" if number == 8 else part, number, TRAINERS[(number + place) % 2])
        for number in range(len(OPTIONS))
        for place, part in enumerate(("kept tokens", "experts"))
    ),
]


@pytest.mark.parametrize(("part", "number", "trainer"), short_tier(dict.fromkeys(CASES), SHORT))
def test_the_learner_takes_what_the_sampler_recorded(model, experts, tmp_path, part, number, trainer):
    more, change = PARTS[part]
    options, folder = OPTIONS[number] | more, experts if part == "experts" else model
    _, rows = train(folder, tmp_path, trainer=trainer, **options)
    found = [row["kv/replay_gap"] for row in rows if "kv/replay_gap" in row]
    assert len(found) == (2 if number in (3, 4) else 3)
    assert 0 < max(found) < 1e-4  # 0 if no token counted
    _, rows = train(folder, tmp_path, trainer=spoiled(trainer, change), **options | {"max_steps": 1})
    assert rows[0]["kv/replay_gap"] > 1e-3
    if "beta" in options:  # the reference, which is the policy before the first update, takes the same
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_the_record_waits_in_host_memory(experts, tmp_path):
    options = {**ALL_THREE, **EXPERTS, "beta": 0.1, "pad_to_multiple_of": 8, "max_steps": 1}
    _, expected = train(experts, tmp_path, **options)
    with two_memories():
        _, rows = train(experts, tmp_path, **options)
    names = [name for name in rows[0] if name.startswith("kv/") or name in ("loss", "kl", "grad_norm")]
    assert 0 < rows[0]["kv/replay_gap"] < 1e-4
    assert {name: rows[0][name] for name in names} == {name: expected[0][name] for name in names}


@pytest.mark.parametrize("trainer", [EvictingGRPOTrainer, EvictingRLOOTrainer])
def test_sets_of_the_whole_vocabulary_give_the_losses_of_trl(model, tmp_path, trainer):
    options = {"beta": 0.1, "max_steps": 2}
    if trainer is EvictingGRPOTrainer:
        options["entropy_coef"] = 0.5  # so that the entropy has a gradient
    recorder = Recorder()
    everything = {"top_k": len(tokenizer())}
    ours, rows = train(model, tmp_path, trainer=trainer, reward=recorder, **KEEPS_ALL | options | everything)
    assert ours._rollout.record.sampling_masks is not None
    _, plain_rows = train_plain(model, tmp_path, recorder, trainer=trainer, **options)
    for row, expected in zip(rows, plain_rows, strict=True):
        for name in ("loss", "grad_norm", "reward", "entropy", "kl"):
            assert row[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name


def kept_logps(logits, batch):
    return kept_logits(logits, batch).log_softmax(-1)


def mean_over(mask, values):
    return (values * mask).sum() / mask.sum()


def test_loss_gradient_and_entropy_are_those_of_the_renormalised_policy(model, tmp_path):
    trainer, rows = train(model, tmp_path, trainer=Watched, max_steps=1, top_k=2)
    batch, network = trainer.batches[0], AutoModelForCausalLM.from_pretrained(model)
    mask = batch["completion_mask"]

    def expected(logps):
        """Return the gradient's norm and the entropy; the ratio is 1, so the gradient is that of log π."""
        chosen = logps.gather(-1, batch["completion_ids"][..., None]).squeeze(-1)
        network.zero_grad()
        (-mean_over(mask, batch["advantages"][:, None] * chosen)).backward(retain_graph=True)
        probs = logps.exp()
        entropy = mean_over(mask, -(probs * logps.masked_fill(probs == 0, 0.0)).sum(-1))
        return float(torch.cat([p.grad.flatten() for p in network.parameters()]).norm()), entropy.item()

    logits = completion_logits(network, batch, shadow=True)
    norm, entropy = expected(kept_logps(logits, batch))
    assert rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert rows[0]["entropy"] == pytest.approx(entropy, rel=1e-4)
    norm, entropy = expected(logits.log_softmax(-1))
    assert rows[0]["grad_norm"] != pytest.approx(norm, rel=1e-2)
    assert rows[0]["entropy"] != pytest.approx(entropy, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [TOP_P, ALL_THREE], ids=str)
def test_the_ratio_is_one_before_the_first_update(model, tmp_path, options):
    class WithRatio(Watched):
        def _compute_loss(self, network, inputs):
            loss = super()._compute_loss(network, inputs)
            log_ratio = (self._learner_logps - inputs["old_per_token_logps"]) * inputs["completion_mask"]
            self.log_ratios = [*getattr(self, "log_ratios", []), log_ratio.abs().max().item()]
            return loss

    trainer, _ = train(model, tmp_path, trainer=WithRatio, **options | TWICE)
    batch = trainer.batches[0]
    old_gap = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"]
    assert old_gap.abs().max() < 1e-4
    assert max(trainer.log_ratios[::2]) < 1e-4  # TRL takes two steps on each rollout
    assert min(trainer.log_ratios[1::2]) > 1e-3


@pytest.mark.slow
def test_the_reference_is_renormalised_too(model, tmp_path):
    # Before the first update the reference is the policy, so that their KL over the same tokens is 0.
    class WholeReference(EvictingGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            rollout = self._rollout
            if not torch.is_grad_enabled():
                self._rollout = rollout.with_record(sampling_masks=None)
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self._rollout = rollout
            return found

    options = {"beta": 0.1, "max_steps": 1} | TOP_P
    _, rows = train(model, tmp_path, **options)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-8)
    _, rows = train(model, tmp_path, trainer=WholeReference, **options)
    assert rows[0]["kl"] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("distillation", ["dense_student", "sparse_student"])
def test_the_distillation_is_over_the_kept_tokens(model, tmp_path, distillation):
    options = {"distillation": distillation, "distillation_weight": 2.0, "beta": 1e-6, "max_steps": 1} | TOP_K
    trainer, rows = train(model, tmp_path, trainer=Watched, **options)
    batch, network = trainer.batches[0], AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        dense, sparse = (completion_logits(network, batch, shadow=shadow) for shadow in (False, True))

    def kl(one, other):  # the dense policy comes first in both
        return float(mean_over(batch["completion_mask"], (one.exp() * (one - other)).nan_to_num(0).sum(-1)))

    expected = kl(kept_logps(dense, batch), kept_logps(sparse, batch))
    assert rows[0]["smd/kl"] == pytest.approx(expected, rel=1e-3)
    assert rows[0]["smd/kl"] != pytest.approx(kl(dense.log_softmax(-1), sparse.log_softmax(-1)), rel=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("distillation", ["none", "dense_student"])
def test_layers_are_recomputed_with_the_experts_of_their_forward(experts, tmp_path, distillation):
    def grad_norm(**options):
        trainer = spoiled(EvictingGRPOTrainer, other_experts)
        options = {"max_steps": 1, "distillation": distillation} | EXPERTS | options
        return train(experts, tmp_path, trainer=trainer, **options)[1][0]["grad_norm"]

    assert grad_norm(gradient_checkpointing=True) == pytest.approx(
        grad_norm(gradient_checkpointing=False), rel=1e-5
    )


def test_reentrant_checkpointing_is_refused(experts, tmp_path):
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="use_reentrant"):
        build(experts, tmp_path, **EXPERTS | options)
