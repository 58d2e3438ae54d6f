import pytest

from lit_rlkv.callbacks.performance import FlopCounter
from lit_rlkv.callbacks.shadow_distillation import ShadowDistillation
from lit_rlkv.diagnostics.flops import flop_costs, learner_work
from lit_rlkv.experience.advantages import GAEAdvantage
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.layouts import ROLES
from tests.hand_built import make_datamodule, make_module, make_ppo, make_roles, replayed, shift


def counted(module, datamodule):
    """Return flops and learned tokens of one iteration's updates, and its batches."""
    batches = list(datamodule.splitter.minibatches(datamodule.collect()))
    counter = FlopCounter(module.roles)
    counter.start()
    for batch in batches:
        module.training_step(batch, 0)["loss"].backward()
    counter.stop()
    module.zero_grad()
    return counter, batches


def expected(roles, batch, role="policy", shadow=True, has_head=True):
    """Return the forward and backward flops of one role on a batch, and its tokens."""
    rollout = batch.rollout
    table = replayed(rollout, shadow=shadow).evicted_at
    work = learner_work(table[..., :-1], n_layers=2, n_kv_heads=2)
    with acting_as(roles, role) as backbone:
        costs = flop_costs(backbone)
    assert costs is not None
    n_positions = int(rollout.response_mask.sum()) if has_head else 0
    forward = int(costs.forward(work)) + n_positions * costs.forward_per_position
    backward = int(costs.backward(work)) + n_positions * costs.backward_per_position
    return forward, backward, int(work.n_tokens)


@pytest.mark.parametrize("layout", ["hydra", "ppo"])  # a frozen head, and one that is computed again
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_policy_gradient_is_one_forward_and_one_backward(layout, checkpoints):
    roles = shift(make_roles(layout, checkpoints_layers=checkpoints))
    module, data = make_module(roles), make_datamodule(roles)
    counter, (batch,) = counted(module, data)
    forward, backward, n_tokens = expected(roles, batch)
    assert counter.flops == forward + backward
    assert counter.n_learned == n_tokens


def test_a_dense_learner_sees_more():
    roles = shift(make_roles())
    counter, (batch,) = counted(make_module(roles, replays=False), make_datamodule(roles))
    forward, backward, _ = expected(roles, batch, shadow=False)
    assert counter.flops == forward + backward > sum(expected(roles, batch)[:2])


def test_micro_batches_cost_what_the_whole_costs():
    roles = shift(make_roles())
    whole, _ = counted(make_module(roles), make_datamodule(roles))
    parts, batches = counted(make_module(roles), make_datamodule(roles, tokens_per_pass=64))
    assert len(batches) >= 4  # responses of up to 16 tokens
    assert parts.flops == whole.flops
    assert parts.n_learned == whole.n_learned


def test_a_critic_learns_from_every_token_again():
    roles = shift(make_roles(needed=ROLES))
    module = make_ppo(roles)
    data = make_datamodule(roles, advantage=GAEAdvantage(1.0, 0.95), learner_parts=module.learner_parts)
    counter, (policy, value) = counted(module, data)
    of_policy = expected(roles, policy)
    of_value = expected(roles, value, "value", has_head=False)
    assert counter.flops == sum(of_policy[:2]) + sum(of_value[:2])
    assert counter.n_learned == of_policy[2] + of_value[2]


@pytest.mark.parametrize("layout", ["hydra", "ppo"])
@pytest.mark.parametrize("teacher", ["reference", "policy"])
def test_a_teacher_has_no_backward_pass(layout, teacher):
    roles = shift(make_roles(layout))
    module = make_module(roles)
    module.loss_terms = [ShadowDistillation("sparse_student", 0.3, teacher).loss_terms]
    counter, (batch,) = counted(module, make_datamodule(roles))
    forward, backward, n_tokens = expected(roles, batch)
    of_teacher, _, _ = expected(roles, batch, teacher, shadow=False)
    # The student's states are those of the policy; its head is read once more, by the KL.
    with acting_as(roles, "policy") as backbone:
        costs = flop_costs(backbone)
    head = int(batch.rollout.response_mask.sum()) * (costs.forward_per_position + costs.backward_per_position)
    assert counter.flops == forward + backward + of_teacher + head
    assert counter.n_learned == n_tokens


def test_what_no_loss_depends_on_has_no_backward_pass():
    roles = shift(make_roles("j_hydra", needed=ROLES))
    module = make_ppo(roles, value_shadow=False)
    data = make_datamodule(
        roles, advantage=GAEAdvantage(1.0, 0.95), critic_warmup=1, warmup_part=module.warmup_part
    )
    assert module.warmup_part == ("value_head",)  # the critic's head alone: its states are detached
    counter, (batch,) = counted(module, data)
    forward, _, _ = expected(roles, batch, "value", shadow=False, has_head=False)
    assert counter.flops == forward
    assert counter.n_learned == 0


def test_after_the_stop_nothing_is_counted_and_a_start_begins_anew():
    roles = shift(make_roles())
    module, data = make_module(roles), make_datamodule(roles)
    counter, (batch,) = counted(module, data)
    before = counter.flops
    module.training_step(batch, 0)["loss"].backward()
    assert counter.flops == before
    counter.start()
    counter.stop()
    assert counter.flops == counter.n_learned == 0
