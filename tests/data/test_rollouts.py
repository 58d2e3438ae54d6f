from dataclasses import fields

import pytest
import torch

from tests.training import make_datamodule, make_roles


def test_one_iteration_after_another_asks_for_new_prompts_and_new_draws():
    data = make_datamodule(make_roles())
    first, second = data.collect(), None
    data.iteration += 1
    second = data.collect()
    assert [p.prompt for p in first.problems] != [p.prompt for p in second.problems]
    assert first.problems[0] == first.problems[3] != first.problems[4]  # groups of four


def test_fewer_rows_at_a_time_give_as_many_responses_from_a_smaller_cache():
    whole = make_datamodule(make_roles()).collect().rollout
    few = make_datamodule(make_roles(), sampling={"max_rows": 4}).collect().rollout
    assert len(few.token_ids) == len(whole.token_ids) == 16
    assert few.kv_bytes * 4 == whole.kv_bytes


def test_a_prompt_is_prefilled_once_for_its_group():
    roles = make_roles()
    data, sizes = make_datamodule(roles), []
    embedding = roles.backbone("policy").get_input_embeddings()
    hook = embedding.register_forward_hook(lambda *call: sizes.append(tuple(call[1][0].shape)))
    data.collect()
    hook.remove()
    prefill, *steps = sizes[:3]
    assert prefill[0] == 4
    assert steps == [(16, 1)] * 2


def test_state_brings_back_the_same_iteration():
    data = make_datamodule(make_roles())
    list(data.train_dataloader())
    state = data.state_dict()
    expected = next(iter(data.train_dataloader()))
    again = make_datamodule(make_roles())
    again.load_state_dict(state)
    found = next(iter(again.train_dataloader()))
    assert torch.equal(found.rollout.token_ids, expected.rollout.token_ids)
    assert torch.equal(found.rollout.death, expected.rollout.death)


@pytest.mark.parametrize(("n_minibatches", "n_micro_batches", "n_epochs"), [(1, 1, 1), (2, 3, 2), (3, 2, 1)])
def test_every_response_is_learned_once_an_epoch_and_weights_sum_to_one_a_step(
    n_minibatches, n_micro_batches, n_epochs
):
    data = make_datamodule(
        make_roles(), n_minibatches=n_minibatches, n_micro_batches=n_micro_batches, n_epochs=n_epochs
    )
    experience = data.collect()
    batches = list(data.minibatches(experience))
    assert sum(batch.ends_step for batch in batches) == n_minibatches * n_epochs
    assert sum(len(batch.advantages) for batch in batches) == 16 * n_epochs
    weight, n_actions, n_fresh = 0.0, 0, 0
    for batch in batches:
        weight += float(batch.loss_weight.sum())
        n_actions += int(batch.rollout.is_action.sum())
        n_fresh += batch.is_fresh and batch.ends_step
        if batch.ends_step:
            assert weight == pytest.approx(1.0, abs=1e-5)
            assert n_actions == batch.n_actions
            weight, n_actions = 0.0, 0
    assert n_fresh == 1


def test_advantages_of_a_group_sum_to_zero_and_stand_on_actions_only():
    data = make_datamodule(make_roles())
    experience = data.collect()
    first = data.credit.assign(experience).advantages
    (batch,) = data.minibatches(experience)
    of_response = first.gather(1, experience.rollout.is_action.float().argmax(dim=1, keepdim=True))
    assert of_response.abs().max() > 0
    torch.testing.assert_close(of_response.view(4, 4).sum(dim=1), torch.zeros(4), rtol=0, atol=1e-5)
    assert (batch.advantages[~batch.rollout.is_action] == 0).all()


def test_rows_and_devices_keep_every_field():
    (batch,) = make_datamodule(make_roles()).train_dataloader()
    part = batch.rows(torch.tensor([3, 1])).to("cpu")
    for field in fields(batch.rollout):
        value, source = getattr(part.rollout, field.name), getattr(batch.rollout, field.name)
        expected = source[[3, 1]] if isinstance(source, torch.Tensor) else source
        assert (value == expected).all() if isinstance(value, torch.Tensor) else value == expected
    assert part.n_actions == batch.n_actions
