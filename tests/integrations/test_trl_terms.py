"""Importance weights and distillation of EvictingGRPOTrainer, against their definitions."""

import pytest

pytest.importorskip("trl")

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.integrations.trl_runs import Watched, completion_logits, kept_logits, save_model, train
from tests.tiers import slow


@pytest.fixture(scope="module")
def sharper(tmp_path_factory):
    """Give a model that evictions change a lot."""
    return save_model(tmp_path_factory.mktemp("sharper"), scale=8.0)


def dense_ratio(model, batch, is_truncated=False):
    """Return π_old / sampler under the dense learner."""
    logits = completion_logits(AutoModelForCausalLM.from_pretrained(model), batch, shadow=False).detach()
    logps = (kept_logits(logits, batch) if is_truncated else logits).log_softmax(-1)
    logps = logps.gather(-1, batch["completion_ids"][..., None]).squeeze(-1)
    return ((logps - batch["sampling_per_token_logps"]) * batch["completion_mask"]).exp()


def expected_weight(correction, ratio):
    if correction == "tis":
        return ratio.clamp(max=2)
    return ratio * ((ratio >= 0.5) & (ratio <= 2))


@pytest.mark.parametrize("correction", ["tis", "mis"])
@pytest.mark.parametrize(  # TRL computes π_old itself with several iterations
    "options", [{}, slow({"num_iterations": 2}), slow({"top_p": 0.7})], ids=str
)
def test_each_token_is_weighted_by_its_importance(model, tmp_path, correction, options):
    options = {"max_steps": 1, "trainer": Watched} | options
    trainer, _ = train(model, tmp_path, correction=correction, **options)
    plain, _ = train(model, tmp_path, correction="naive", **options)
    ratio = dense_ratio(model, trainer.batches[0], is_truncated="top_p" in options)
    assert (ratio - 1).abs().max() > 0.1
    expected = plain.batches[0]["advantages"][:, None] * expected_weight(correction, ratio)
    torch.testing.assert_close(trainer.batches[0]["advantages"], expected, atol=1e-5, rtol=1e-4)


def test_mis_drops_tokens_outside_of_its_interval(sharper, tmp_path):
    trainer, _ = train(sharper, tmp_path, trainer=Watched, correction="mis", max_steps=1)
    batch = trainer.batches[0]
    ratio = dense_ratio(sharper, batch)
    is_dropped = ((ratio < 0.5) | (ratio > 2)) & batch["completion_mask"].bool()
    assert is_dropped.any()
    assert (batch["advantages"][is_dropped] == 0).all()


def test_vespo_gets_the_weights_of_tokens_for_its_sequences(model, tmp_path):
    options = {"max_steps": 1, "loss_type": "vespo"}
    trainer, rows = train(model, tmp_path, trainer=Watched, correction="tis", **options)
    _, plain_rows = train(model, tmp_path, correction="naive", **options)
    batch = trainer.batches[0]
    ratio = dense_ratio(model, batch)
    torch.testing.assert_close(batch["importance_sampling_ratio"], ratio.clamp(max=2), atol=1e-5, rtol=1e-4)
    assert batch["advantages"].ndim == 1
    assert rows[0]["vespo/phi_seq_mean"] != pytest.approx(plain_rows[0]["vespo/phi_seq_mean"], rel=1e-3)


def mean_kl(teacher, student, batch):
    teacher, student = teacher.log_softmax(-1), student.log_softmax(-1)
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    return (kl * batch["completion_mask"]).sum() / batch["completion_mask"].sum()


@pytest.mark.parametrize(
    ("options", "peft_config"),
    [
        slow({"distillation": "dense_student"}, None),
        ({"distillation": "dense_student", "correction": "tis"}, None),
        slow({"distillation": "sparse_student", "beta": 1e-6}, None),
        slow({"distillation": "sparse_student"}, LoraConfig(r=2, target_modules="all-linear")),
        ({"distillation": "sparse_student", "correction": "naive", "beta": 1e-6}, None),
    ],
    ids=["dense", "dense-tis", "sparse", "sparse-lora", "sparse-naive"],
)
def test_the_distillation_adds_its_weighted_kl(sharper, tmp_path, options, peft_config):
    arguments = {"arguments": {"peft_config": peft_config}, "max_steps": 1}
    trainer, rows = train(sharper, tmp_path, trainer=Watched, distillation_weight=2.0, **options, **arguments)
    _, plain = train(sharper, tmp_path, **options | {"distillation": "none"}, **arguments)
    batch = trainer.batches[0]
    network = AutoModelForCausalLM.from_pretrained(sharper)
    with torch.no_grad():
        dense, sparse = (completion_logits(network, batch, shadow=shadow) for shadow in (False, True))
    # The teacher is the first argument of the KL only for the sparse student; at the first step the reference
    # is the policy.
    kl = mean_kl(dense, sparse, batch).item()
    assert kl > 1e-3
    assert kl != pytest.approx(mean_kl(sparse, dense, batch).item(), rel=5e-3)
    assert rows[0]["smd/kl"] == pytest.approx(kl, rel=1e-3)
    assert rows[0]["loss"] - plain[0]["loss"] == pytest.approx(2 * kl, rel=1e-3)
    assert "smd/kl" not in plain[0]


@pytest.mark.parametrize("distillation", ["dense_student", "sparse_student"])
def test_only_the_student_of_the_distillation_learns(sharper, tmp_path, distillation):
    def same(completions, **_):
        return [0.0] * len(completions)  # no advantages, so that the loss is the KL

    options = {"distillation": distillation, "distillation_weight": 1.0, "beta": 1e-9, "max_steps": 1}
    trainer, rows = train(sharper, tmp_path, trainer=Watched, reward=same, max_grad_norm=1e9, **options)
    network = AutoModelForCausalLM.from_pretrained(sharper)

    def grad_norm(*, dense_learns):
        network.zero_grad()
        dense = completion_logits(network, trainer.batches[0], shadow=False)
        sparse = completion_logits(network, trainer.batches[0], shadow=True)
        dense, sparse = (dense, sparse.detach()) if dense_learns else (dense.detach(), sparse)
        mean_kl(dense, sparse, trainer.batches[0]).backward()
        return float(torch.cat([p.grad.flatten() for p in network.parameters()]).norm())

    is_dense = distillation == "dense_student"
    assert rows[0]["grad_norm"] == pytest.approx(grad_norm(dense_learns=is_dense), rel=1e-3)
    assert rows[0]["grad_norm"] != pytest.approx(grad_norm(dense_learns=not is_dense), rel=1e-2)


def test_the_distillation_does_not_depend_on_the_split_into_micro_batches(sharper, tmp_path):
    options = {"distillation": "dense_student", "distillation_weight": 1.0, "max_steps": 2}
    _, rows = train(sharper, tmp_path, **options)
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    _, split_rows = train(sharper, tmp_path, **options, **split)
    for name in ("loss", "grad_norm"):
        assert split_rows[0][name] == pytest.approx(rows[0][name], rel=1e-4)
