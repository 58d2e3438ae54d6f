import pytest
import torch

from lit_rlkv.data.demonstrations import PreferenceDataModule
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.activations import checkpointed_layers
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.tasks import ChainSum
from tests.hand_built import train_here


def make_run(n_steps=40, lm_weight=1.0, reward_weight=0.5, checkpoints_layers=False, **data):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 64}
    backbone = prepare_backbone(tiny_qwen3(51, 0, 1, **size))

    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=5e-3)

    weights = {"lm_weight": lm_weight, "reward_weight": reward_weight}
    module = HydraSFT(
        backbone,
        make_optimizer,
        **weights,
        n_steps=n_steps,
        n_warmup_steps=5,
        checkpoints_layers=checkpoints_layers,
    )
    task = ChainSum(n_terms=2, max_operand=3)
    options = {"batch_size": 16, "n_pairs": 8, "steps_per_loader": 10, "seed": 0} | data
    source = PromptSource(task, split="train", seed=0)
    return module, PreferenceDataModule(task, source, build_task_tokenizer(), **options)


def learn(**options):
    """Return the metrics of 12 iterations of 10 steps each."""
    return train_here(*make_run(n_steps=120, **options), n_iterations=12).rows


def forwards(module, batch):
    """Return the shapes of the token ids that the backbone reads in one step."""
    shapes = []

    def note(backbone, args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    with module.backbone.base_model.register_forward_pre_hook(note, with_kwargs=True):
        module.training_step(batch, 0)
    return shapes


@pytest.mark.parametrize(
    ("options", "falling"),
    [
        ({}, {"lm_loss", "reward_loss"}),
        ({"lm_weight": 0.0, "reward_weight": 1.0, "n_pairs": 16}, {"reward_loss"}),
        ({"reward_weight": 0.0}, {"lm_loss"}),
    ],
    ids=["both", "reward", "lm"],
)
def test_the_heads_that_have_a_weight_learn_on_one_backbone(options, falling):
    rows = learn(**options)
    assert {"lm_loss", "reward_loss"} & rows[-1].keys() == falling
    assert all(rows[-1][name] < 0.5 * rows[0][name] for name in falling)
    assert ("pair_accuracy" in rows[-1]) == ("reward_loss" in falling)
    assert rows[-1].get("pair_accuracy", 1.0) > 0.8
    assert rows[-1]["learning_rate"] < 0.1 * 5e-3


def test_a_head_of_weight_0_costs_no_forward():
    _, datamodule = make_run()
    batch = datamodule.next_batch()
    chosen, rejected = tuple(batch.chosen.input_ids.shape), tuple(batch.rejected.input_ids.shape)
    assert (chosen[0], rejected[0]) == (16, 8)
    assert forwards(make_run()[0], batch) == [chosen, rejected]
    assert forwards(make_run(reward_weight=0.0)[0], batch) == [chosen]
    assert forwards(make_run(lm_weight=0.0)[0], batch) == [(8, chosen[1]), rejected]


def test_a_head_of_weight_0_leaves_the_other_loss_as_it_is():
    batch = make_run()[1].next_batch()
    both = make_run(lm_weight=2.0)[0]
    both.reward_head.linear.weight.data.normal_()
    ranking = make_run(lm_weight=0.0)[0]
    ranking.reward_head.load_state_dict(both.reward_head.state_dict())
    imitating = make_run(reward_weight=0.0)[0]
    found = both.training_step(batch, 0)
    reward_loss = ranking.training_step(batch, 0)["reward_loss"]
    lm_loss = imitating.training_step(batch, 0)["lm_loss"]
    assert float(found["reward_loss"]) == pytest.approx(float(reward_loss), rel=1e-5)
    assert torch.equal(found["lm_loss"], lm_loss)
    # the weights are 2 and 0.5
    expected = 2 * float(lm_loss) + 0.5 * float(reward_loss)
    assert float(found["loss"].detach()) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(float(lm_loss) + 0.5 * float(reward_loss), rel=1e-2)


@pytest.mark.parametrize("reward", [0.0, float("nan")])
def test_ties_and_nan_count_as_wrong_pairs(reward):
    module, datamodule = make_run()
    module.reward_head.linear.bias.data.fill_(reward)
    assert float(module.training_step(datamodule.next_batch(), 0)["pair_accuracy"]) == 0.0


def test_weights_that_leave_nothing_to_learn_are_refused():
    with pytest.raises(ValueError, match="lm_weight or reward_weight must not be 0, got 0 for both"):
        make_run(lm_weight=0.0, reward_weight=0)


@pytest.mark.parametrize("lm_weight", [0.0, 1.0])
def test_a_reward_head_without_pairs_is_refused(lm_weight):
    module, datamodule = make_run(lm_weight=lm_weight, n_pairs=0)
    with pytest.raises(ValueError, match=r"reward_weight=0\.5 needs preference pairs"):
        module.training_step(datamodule.next_batch(), 0)


def test_sequences_beyond_the_positions_of_the_backbone_are_refused():
    module, datamodule = make_run()
    module.backbone.config.max_position_embeddings = 5
    with pytest.raises(ValueError, match="has positions for 5"):
        module.training_step(datamodule.next_batch(), 0)


def test_losses_equal_their_definition():
    module, datamodule = make_run()
    module.reward_head.linear.weight.data.normal_()
    batch = datamodule.next_batch()
    found = module.training_step(batch, 0)

    def forward(side):
        positions = (side.attention_mask.long().cumsum(1) - 1).clamp(min=0)
        return module.backbone(
            input_ids=side.input_ids,
            attention_mask=side.attention_mask.long(),
            position_ids=positions,
            use_cache=False,
            output_hidden_states=True,
        )

    chosen, rejected = forward(batch.chosen), forward(batch.rejected)
    logps = chosen.logits.log_softmax(-1)
    nll = [
        -float(logps[row, column - 1, batch.chosen.input_ids[row, column]])
        for row, column in batch.chosen.is_target.nonzero().tolist()
    ]
    assert float(found["lm_loss"]) == pytest.approx(sum(nll) / len(nll), rel=1e-4)

    def rewards(output, side):
        last = [int(row.nonzero().max()) for row in side.attention_mask]
        hidden = output.hidden_states[-1]
        return torch.stack([module.reward_head.linear(hidden[r, c]) for r, c in enumerate(last)]).flatten()

    margin = rewards(chosen, batch.chosen)[:8] - rewards(rejected, batch.rejected)
    expected = -torch.nn.functional.logsigmoid(margin).mean()
    assert float(found["reward_loss"]) == pytest.approx(float(expected), rel=1e-4)
    total = float(found["lm_loss"]) + 0.5 * float(expected)
    assert float(found["loss"]) == pytest.approx(total, rel=1e-4)


def test_a_given_head_is_trained_further():
    module, datamodule = make_run()
    head = module.reward_head
    again = HydraSFT(
        module.backbone,
        module.make_optimizer,
        reward_weight=1.0,
        n_steps=2,
        n_warmup_steps=0,
        reward_head=head,
    )
    assert again.reward_head is head
    again.training_step(datamodule.next_batch(), 0)["loss"].backward()
    assert head.linear.weight.grad.abs().max() > 0


def saved_bytes_and_gradients(module, batch):
    """Return the bytes that a step saves for its backward pass, the forwards of layers, and the gradients."""
    saved, n_forwards = {}, []

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    for parameter in module.parameters():
        parameter.grad = None
    handles = [
        layer.self_attn.register_forward_hook(lambda *call: n_forwards.append(1))
        for layer in module.backbone.model.layers
    ]
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = module.training_step(batch, 0)["loss"]
    n_bytes = sum(size for _, size in saved.values())
    loss.backward()
    for handle in handles:
        handle.remove()
    return n_bytes, len(n_forwards), {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("weights", [(1.0, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_checkpointing_saves_memory_recomputes_and_changes_no_gradient(weights):
    options = {"lm_weight": weights[0], "reward_weight": weights[1], "n_pairs": 16 if weights[1] else 0}
    plain, checkpointed = make_run(**options)[0], make_run(**options, checkpoints_layers="host")[0]
    data = make_run(**options)[1]
    batch, other = data.next_batch(), data.next_batch()
    for module in (plain, checkpointed):
        if module.reward_head is not None:
            module.reward_head.linear.weight.data.fill_(0.1)
    n_bytes, n_forwards, gradients = saved_bytes_and_gradients(plain, batch)
    fewer, recomputed, found = saved_bytes_and_gradients(checkpointed, batch)
    assert fewer < 0.7 * n_bytes
    assert recomputed == 2 * n_forwards  # each layer once more in the backward pass
    assert found.keys() == gradients.keys()
    assert all((found[name] - gradients[name]).abs().max() < 1e-6 for name in gradients)
    _, _, of_other = saved_bytes_and_gradients(checkpointed, other)
    assert max(float((of_other[name] - gradients[name]).abs().max()) for name in gradients) > 1e-3
    # outside of its own steps the backbone is as it was
    assert not any(layer.gradient_checkpointing for layer in checkpointed_layers(plain.backbone))
    with torch.no_grad():
        expected = plain.training_step(batch, 0)["loss"]
        assert torch.equal(checkpointed.training_step(batch, 0)["loss"], expected)
