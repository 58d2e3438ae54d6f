from dataclasses import replace

import pytest
import routing
import torch

from lit_rlkv import prepare_backbone


def test_every_family_precision_and_update_is_a_line(capsys, monkeypatch):
    family = next(iter(routing.FAMILIES))
    monkeypatch.setattr(routing, "FAMILIES", {family: routing.FAMILIES[family]})
    routing.main(["--fast"])
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line[len(family) :].split()[:2] for line in lines] == [
        [precision, update] for precision in routing.PRECISIONS for update in ("none", "1e-06", "1e-05")
    ]


@pytest.mark.parametrize("family", ["DeepSeek-V3, 4 of 32"])
def test_flips_are_tokens_whose_set_of_experts_differs(family):
    model = prepare_backbone(routing.make_model(family, 0, "cpu"))
    rollout = routing.sample_routed(model, 0, 2, 8)
    found = routing.measure(model, rollout)
    assert found["flips per layer"] == found["tokens that flip"] == 0
    assert found["gap, chosen"] == found["gap, replayed"] < 1e-4
    # another order is no flip; another expert of 1 of 23 tokens of a row of 2, in 1 of 5 layers, is one
    turned = replace(rollout, expert_ids=rollout.expert_ids.flip(2))
    assert routing.measure(model, turned)["flips per layer"] == 0
    ids = rollout.expert_ids.clone()
    free = next(expert for expert in range(32) if expert not in ids[1, 2, :, 20])
    ids[1, 2, 0, 20] = free
    found = routing.measure(model, replace(rollout, expert_ids=ids))
    assert found["flips per layer"] == pytest.approx(1 / (2 * 23 * 5))
    assert found["tokens that flip"] == pytest.approx(1 / (2 * 23))
    assert found["gap, replayed"] > 1e-3 > found["gap, chosen"]


def test_an_update_moves_the_float32_weights_by_the_learning_rate_and_leaves_the_first_model():
    family = next(iter(routing.FAMILIES))
    model = routing.make_model(family, 0, "cpu")
    rollout = routing.sample_routed(prepare_backbone(routing.make_model(family, 0, "cpu")), 0, 2, 8)
    after = dict(routing.step_of_adam(model, rollout, 1e-3).named_parameters())
    moves = torch.cat([(after[name] - p).detach().abs().flatten() for name, p in model.named_parameters()])
    assert float(moves.max()) == pytest.approx(1e-3, rel=1e-2)
    assert all(p.grad is None for p in model.parameters())
