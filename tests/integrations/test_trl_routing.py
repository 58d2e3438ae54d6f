"""replay_routing through TRL's trainers: the learner takes the experts of the sampler's routers."""

import pytest

pytest.importorskip("trl")

import torch

from lit_rlkv.integrations.trl import EvictingGRPOTrainer, EvictingRLOOTrainer
from lit_rlkv.types import OWN_CHOICE
from tests.integrations.trl_runs import IN_TWO_PARTS, TWICE, build, tokenizer, train
from tests.models_zoo import build as build_network
from tests.models_zoo import tiny_config
from tests.tiers import slow

N_EXPERTS = 4
ROUTES = {"replay_routing": True}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    vocabulary = tokenizer()
    sizes = {"vocab_size": len(vocabulary), "num_experts": N_EXPERTS, "moe_intermediate_size": 24}
    tokens = {"pad_token_id": vocabulary.pad_token_id, "eos_token_id": vocabulary.eos_token_id}
    network = build_network(tiny_config("qwen3_moe", **sizes, **tokens))
    folder = tmp_path_factory.mktemp("moe")
    network.save_pretrained(folder)
    return str(folder)


def shifted(trainer):
    """Return the trainer with a record of other experts than the sampler's."""

    class Shifted(trainer):
        def sample(self, prompt_ids):
            found = super().sample(prompt_ids)
            ids = self._rollout.record.expert_ids
            others = torch.where(ids == OWN_CHOICE, ids, (ids + 1) % N_EXPERTS)
            self._rollout = self._rollout.with_record(expert_ids=others)
            return found

    return Shifted


@pytest.mark.parametrize("trainer", [EvictingGRPOTrainer, slow(EvictingRLOOTrainer)])
@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        slow(IN_TWO_PARTS),
        slow(TWICE),
        slow({"top_p": 0.8}),
        slow({"pad_to_multiple_of": 8}),
        slow({"model_init_kwargs": {"output_router_logits": True}, "beta": 0.1}),
    ],
    ids=str,
)
def test_the_learner_takes_the_experts_of_the_sampler(experts, tmp_path, trainer, options):
    _, rows = train(experts, tmp_path, trainer=trainer, **ROUTES | options)
    found = [row["kv/replay_gap"] for row in rows if "kv/replay_gap" in row]
    assert max(found) < 1e-4
    _, rows = train(experts, tmp_path, trainer=shifted(trainer), **ROUTES | options | {"max_steps": 1})
    assert rows[0]["kv/replay_gap"] > 0.1
    if "beta" in options:  # the reference, which is the policy before the first update, takes them too
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("distillation", ["none", "dense_student"])
def test_layers_are_recomputed_with_the_experts_of_their_forward(experts, tmp_path, distillation):
    def grad_norm(**options):
        trainer = shifted(EvictingGRPOTrainer)
        options = {"max_steps": 1, "distillation": distillation} | ROUTES | options
        return train(experts, tmp_path, trainer=trainer, **options)[1][0]["grad_norm"]

    assert grad_norm(gradient_checkpointing=True) == pytest.approx(
        grad_norm(gradient_checkpointing=False), rel=1e-5
    )


def test_reentrant_checkpointing_is_refused(experts, tmp_path):
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="use_reentrant"):
        build(experts, tmp_path, **ROUTES | options)
