import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.models import replay_logps
from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter
from lit_rlkv.models.replay import response_hidden, response_logps_and_entropy
from lit_rlkv.types import NEVER, Rollout
from tests.models_zoo import VOCAB, tiny_model
from tests.rollouts import TOLERANCE, gap, roll_out


def sampled(cache: str = "h2o", **options: Any) -> Rollout:
    return roll_out("llama", cache, **{"max_new_tokens": 16, "eos_token_id": 5} | options)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_without_log_probs_is_refused(temperature: float):
    with pytest.raises(ValueError, match=rf"temperature must be .*, got {temperature}; greedy decoding"):
        replay_logps(tiny_model(), sampled(), temperature=temperature)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_log_probs_are_those_of_the_sampler_at_its_temperature(temperature: float):
    rollout = sampled(temperature=temperature)
    logps = replay_logps(tiny_model(), rollout)
    assert torch.equal(logps, replay_logps(tiny_model(), rollout, temperature=temperature))
    gap = (logps - rollout.rollout_logps).abs().max()
    wrong = (replay_logps(tiny_model(), rollout, temperature=1.0) - rollout.rollout_logps).abs().max()
    assert gap < 1e-4 < 1e-1 < wrong


def test_a_greedy_rollout_is_replayed_at_a_given_temperature_alone():
    rollout = sampled(temperature=0.0)
    with pytest.raises(ValueError, match="the rollout is greedy, so its tokens have no log-probs to replay"):
        replay_logps(tiny_model(), rollout)
    logps = replay_logps(tiny_model(), rollout, temperature=1.0)
    assert (logps[rollout.response_mask] < 0).all()


def test_log_probs_are_at_the_response_tokens_and_zero_elsewhere():
    rollout = sampled()
    logps = replay_logps(tiny_model(), rollout)
    assert (logps[rollout.response_mask] < 0).all()
    assert (logps[~rollout.response_mask] == 0).all()


def test_without_the_shadow_they_are_the_dense_log_probs_of_transformers():
    rollout, model = sampled(), tiny_model()
    positions = (rollout.attention_mask.long().cumsum(1) - 1).clamp(min=0)
    logits = model(
        rollout.input_ids, attention_mask=rollout.attention_mask.long(), position_ids=positions
    ).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, rollout.input_ids[:, 1:, None]).squeeze(-1)
    expected = torch.zeros(rollout.input_ids.shape)
    expected[:, 1:] = chosen.masked_fill(~rollout.response_mask[:, 1:], 0.0)
    torch.testing.assert_close(replay_logps(model, rollout, shadow=False), expected, rtol=1e-5, atol=1e-5)
    assert (replay_logps(model, rollout) - expected).abs().max() > 0.1


def test_entropies_are_those_of_the_distribution_that_was_sampled():
    rollout, model = sampled(), tiny_model()
    hidden = response_hidden(model, rollout, shadow=True)
    _, entropy = response_logps_and_entropy(model, rollout, hidden, 1.0)
    expected = torch.distributions.Categorical(logits=model.lm_head(hidden)).entropy()
    torch.testing.assert_close(entropy[rollout.response_mask], expected)
    assert (entropy[~rollout.response_mask] == 0).all()


def trained(model):
    """The parameters but those of the kv_scorer, which no log-prob of a token reads."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients(model: PreTrainedModel, rollout: Rollout) -> list[Tensor]:
    loss = replay_logps(model, rollout).sum()
    return list(torch.autograd.grad(loss, trained(model)))


def test_gradients_flow_to_every_parameter():
    for gradient in gradients(tiny_model(), sampled()):
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


def test_the_gradient_is_the_slope_of_the_log_probs():
    # Along the gradient itself, a step of eps changes the sum by eps times the gradient's square norm.
    rollout, model = sampled(), copy.deepcopy(tiny_model()).double()
    rollout_gradients = gradients(model, rollout)
    square_norm = sum(float(g.square().sum()) for g in rollout_gradients)
    eps = 1e-3 / square_norm**0.5
    sums = []
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, gradient in zip(trained(model), rollout_gradients, strict=True):
                parameter.add_(sign * eps * gradient)
            sums.append(float(replay_logps(model, rollout).double().sum()))
    assert (sums[0] - sums[1]) / (2 * eps) == pytest.approx(square_norm, rel=1e-2)


def test_gradient_checkpointing_changes_neither_log_probs_nor_gradients():
    rollout, plain = sampled(), tiny_model()
    checkpointed = copy.deepcopy(plain).train()
    checkpointed.activation_checkpointing_enable()
    assert torch.equal(replay_logps(checkpointed, rollout), replay_logps(plain, rollout))
    for a, b in zip(gradients(checkpointed, rollout), gradients(plain, rollout), strict=True):
        torch.testing.assert_close(a, b)


def test_a_model_that_trains_with_gradient_checkpointing_can_sample():
    checkpointed = copy.deepcopy(tiny_model()).train()
    checkpointed.activation_checkpointing_enable()
    again = roll_out(checkpointed, "h2o", max_new_tokens=16, eos_token_id=5)
    assert torch.equal(again.input_ids, sampled().input_ids)
    assert torch.equal(again.evicted_at, sampled().evicted_at)


def test_logits_of_all_positions_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_rlkv.kernels.token_logps.reference.MAX_CHUNK_LOGITS", 5 * VOCAB)
    rollout, model, n_positions = sampled(), tiny_model(), []
    handle = model.lm_head.register_forward_hook(
        lambda module, args, out: n_positions.append(args[0].shape[0])
    )
    try:
        replay_logps(model, rollout).sum().backward()
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
    assert rollout.response_mask.sum() > 5
    assert max(n_positions) == 5


def gradients_and_head_calls(model: PreTrainedModel, rollout: Rollout) -> tuple[list[Tensor], list[int]]:
    """Return the gradients below the output head, and the positions of each call of the head."""
    n_positions: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _, args, out: n_positions.append(len(args[0])))
    below = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("lm_head")]
    try:
        with use_adapter(lora_layers(model), "policy"):
            logps = replay_logps(model, rollout)
            upstream = torch.linspace(1, 2, logps.numel()).view_as(logps)
            return list(torch.autograd.grad(logps, below, upstream)), n_positions
    finally:
        handle.remove()


@pytest.mark.parametrize("has_adapter", [True, False], ids=["LoRA", "all but the head"])
def test_the_head_is_called_once_per_chunk_if_it_is_frozen_and_twice_if_it_trains(
    has_adapter: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lit_rlkv.kernels.token_logps.reference.MAX_CHUNK_LOGITS", 5 * VOCAB)
    rollout, model = sampled(), copy.deepcopy(tiny_model())
    if has_adapter:
        add_adapter(model, "policy", LoraSpec(rank=4, alpha=8, target_modules="all-linear"))
    model.lm_head.requires_grad_(False)
    of_frozen, n_positions = gradients_and_head_calls(model, rollout)
    n_response_tokens = int(rollout.response_mask.sum())
    chunks = [5] * (n_response_tokens // 5) + [n_response_tokens % 5] * (n_response_tokens % 5 > 0)
    assert len(chunks) > 2
    assert n_positions == [0, *chunks]  # of no position: whether its logits would need a gradient
    model.lm_head.requires_grad_(True)
    of_trained, n_positions = gradients_and_head_calls(model, rollout)
    assert sorted(n_positions) == sorted(2 * chunks)
    assert sum(float(gradient.abs().max()) > 0 for gradient in of_trained) >= len(of_trained) / 2
    for a, b in zip(of_frozen, of_trained, strict=True):
        torch.testing.assert_close(a, b)


def test_a_rollout_that_has_lost_its_record_is_refused():
    rollout = sampled().without_records()
    with pytest.raises(ValueError, match="record of evictions"):
        replay_logps(tiny_model(), rollout)
    assert replay_logps(tiny_model(), rollout, shadow=False).isfinite().all()


NOISE = "sampler and learner would not be one function"


def with_adapter(dropout: float) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model())  # prepared before the adapter, as in the README
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=dropout), model)
    return model.train()


def test_dropout_that_came_after_the_preparation_is_refused_where_it_is_active():
    rollout, model = sampled(), with_adapter(0.05)
    with pytest.raises(ValueError, match=f"lora_dropout.*{NOISE}"):
        replay_logps(model, rollout)
    with pytest.raises(ValueError, match=f"lora_dropout.*{NOISE}"):
        roll_out(model, max_new_tokens=4)
    for quiet in (with_adapter(0.0), with_adapter(0.05).eval()):
        assert gap(quiet, roll_out(quiet, max_new_tokens=4)) < TOLERANCE


def test_the_noise_of_neftune_is_refused_where_it_is_active():
    model = copy.deepcopy(tiny_model()).train()
    model.get_input_embeddings().neftune_noise_alpha = 5
    with pytest.raises(ValueError, match=NOISE):
        replay_logps(model, sampled())
    replay_logps(model.eval(), sampled())


N_COLUMNS = sampled().input_ids.shape[1]
FAULTS = {
    "negative": (lambda r: r.evicted_at.where(r.evicted_at != NEVER, -1), "2147483647 .* for never"),
    "zeros": (lambda r: torch.zeros_like(r.evicted_at), "above the key's own column"),
    "own column": (
        lambda r: torch.arange(N_COLUMNS).int().expand_as(r.evicted_at) * r.attention_mask[:, None, None],
        "above the key's own column",
    ),
    "a layer too few": (lambda r: r.evicted_at[:, :-1], "for 3 layers and 2 KV heads, or 1 for all, got"),
    "query heads": (lambda r: r.evicted_at.repeat(1, 1, 2, 1), "for 3 layers and 2 KV heads"),
    "a column short": (lambda r: r.evicted_at[..., :-1], "evicted_at must have the rows and columns of"),
    "a row short": (lambda r: r.evicted_at[:-1], "evicted_at must have the rows and columns of"),
    "no layers": (lambda r: r.evicted_at[:, 0, 0], "must be whole numbers"),
    "floats": (lambda r: r.evicted_at.double(), "must be whole numbers"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_record_that_cannot_be_one_is_refused_in_one_line(name: str):
    change, says = FAULTS[name]
    rollout = sampled()
    object.__setattr__(rollout.record, "evicted_at", change(rollout))
    with pytest.raises(ValueError, match=says) as refusal:
        replay_logps(tiny_model(), rollout)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "input_ids",
            lambda one: one.index_fill(1, torch.tensor(3), VOCAB),
            "0 to 63, the tokens of the model",
        ),
        ("attention_mask", lambda one: one[:, 1:], "attention_mask must have the rows and columns"),
        ("response_mask", torch.ones_like, "within attention_mask alone, and after column 0"),
        ("rollout_logps", lambda one: one[:-1], "rollout_logps must have the rows and columns"),
    ],
)
def test_tokens_and_masks_that_do_not_fit_are_refused(name, change, says):
    rollout = sampled()
    object.__setattr__(rollout, name, change(getattr(rollout, name)))
    with pytest.raises(ValueError, match=says):
        replay_logps(tiny_model(), rollout)


def test_masks_of_0_and_1_are_taken_as_transformers_has_them():
    rollout = sampled()
    masks = {name: getattr(rollout, name).long() for name in ("attention_mask", "response_mask")}
    foreign = Rollout(**{**vars(rollout), **masks})
    assert torch.equal(replay_logps(tiny_model(), foreign), replay_logps(tiny_model(), rollout))
    with pytest.raises(ValueError, match="attention_mask must be True or 1 on tokens"):
        Rollout(**{**vars(rollout), "attention_mask": 2 * masks["attention_mask"]})


def test_one_table_for_all_layers_and_heads_and_any_time_of_never_is_a_record():
    rollout = sampled("streaming")
    expected = replay_logps(tiny_model(), rollout)
    one = rollout.evicted_at[:, :1, :1].long()
    foreign = rollout.with_record(evicted_at=one.where(one != NEVER, torch.iinfo(torch.int64).max))
    torch.testing.assert_close(replay_logps(tiny_model(), foreign), expected)


def test_a_table_in_place_of_a_record_is_refused_by_name():
    rollout = sampled()
    with pytest.raises(TypeError, match="record must be a Record"):
        Rollout(**{**vars(rollout), "record": rollout.evicted_at})
