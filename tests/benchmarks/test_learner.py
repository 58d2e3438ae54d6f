import json
from functools import partial

import learner
import pytest
import record
import torch
from kernel_parts import learner as kernel_learner
from kernel_parts.accuracy import LIMIT, WrongKernelError
from kernel_parts.case import Setting
from kernel_parts.learner import Shape, check, make_model, make_rollout, shadow_logps, step, torch_logps

from lit_rlkv.models import replay_logps

DEVICE, TIMED = ("cuda", "triton") if torch.cuda.is_available() else ("cpu", "reference")
SETTING = Setting("cpu", is_toy=True, n_rounds=1)
SHAPE = Shape(learner.PRESETS["tiny"], batch=2, interval=4, prompt=6, checkpoints_layers=False)


@pytest.mark.slow
def test_a_run_prints_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setitem(kernel_learner.CHECK_LEN, DEVICE, 24)
    asked = f"--device {DEVICE} --preset tiny --layers 1 --lengths 24 40 --budgets 8 12 --interval 4"
    args = learner.parse_arguments([*asked.split(), "--prompt", "6", "--rounds", "1", "--record"])
    results = kernel_learner.run(args, learner.PRESETS[args.preset])
    printed = capsys.readouterr().out
    views = {f"{view}, {TIMED}" for view in ("shadow 8", "shadow 12", "dense")} | {"torch dense"}
    assert views <= {arm.name for arm in results[0].arms}
    assert all(view in printed for view in views)
    rows = [json.loads(line) for line in (tmp_path / "learner.jsonl").read_text().splitlines()]
    assert [row["sizes"]["seq"] for row in rows] == [24, 40]
    assert rows[0]["sizes"]["num_hidden_layers"] == 1
    assert rows[0]["excess_error"] <= LIMIT
    assert all(arm["peak_bytes"] > 0 for row in rows for arm in row["arms"])
    assert not any(row["out_of_memory"] for row in rows)
    kernel_learner.run(args, learner.PRESETS[args.preset])
    assert "40 tokens: in the record already" in capsys.readouterr().out


def test_a_length_that_memory_does_not_hold_is_a_row_and_not_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setitem(kernel_learner.CHECK_LEN, "cpu", 12)
    make_case = kernel_learner.make_case

    def small_memory(setting, model, shape, length, budgets):
        if length > 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_case(setting, model, shape, length, budgets)

    monkeypatch.setattr(kernel_learner, "make_case", small_memory)
    asked = "--device cpu --layers 1 --lengths 40 24 --budgets 8 --interval 4 --prompt 6 --rounds 1 --record"
    args = learner.parse_arguments(asked.split())
    kernel_learner.run(args, learner.PRESETS["tiny"])
    rows = record.rows("learner")
    assert [(row["asked"]["tokens"], row["out_of_memory"]) for row in rows] == [(40, True), (24, False)]


def test_the_rollout_evicts_and_its_response_is_all_actions():
    rollout = make_rollout(SETTING, SHAPE, 30, budget=8)
    # 2 sequences, 2 layers, 2 KV heads; 6 tokens of prompt, and a compaction every 4 more: 10, 14, .. 26.
    assert rollout.evicted_at.shape == (2, 2, 2, 30)
    assert set(rollout.evicted_at.unique().tolist()) == {10, 14, 18, 22, 26, 2**31 - 1}
    assert rollout.response_mask.sum() == 2 * (30 - 6)


def test_plain_torch_computes_the_dense_view_and_not_the_shadow_view():
    model = make_model(SETTING, SHAPE, 30)
    rollout = make_rollout(SETTING, SHAPE, 30, budget=8)
    dense = replay_logps(model, rollout, shadow=False)
    torch.testing.assert_close(torch_logps(model, rollout), dense, atol=1e-5, rtol=1e-5)
    assert (replay_logps(model, rollout) - dense).abs().max() > 1e-3


def test_a_step_returns_the_gradients_and_leaves_none():
    model = make_model(SETTING, SHAPE, 30)
    rollout = make_rollout(SETTING, SHAPE, 30, budget=8)
    logps, *gradients = step(model, shadow_logps, rollout, "reference")
    assert logps.shape == (2, 30)
    assert len(gradients) == len(list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_recomputed_layers_give_the_same_gradients():
    rollout = make_rollout(SETTING, SHAPE, 30, budget=8)
    recomputing = Shape(SHAPE.sizes, SHAPE.batch, SHAPE.interval, SHAPE.prompt, checkpoints_layers=True)
    plain, recomputed = (
        step(make_model(SETTING, shape, 30), shadow_logps, rollout, "reference")
        for shape in (SHAPE, recomputing)
    )
    for expected, actual in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(actual, expected)


def test_kernels_that_replay_other_evictions_are_refused():
    model = make_model(SETTING, SHAPE, 30)

    def always_dense(model, logps, rollout, kernels):
        return step(model, partial(replay_logps, shadow=False), rollout, "reference")

    with pytest.raises(WrongKernelError, match="shadow view, 24 tokens"):
        check(SETTING, model, SHAPE, 24, 8, always_dense)


def test_kernels_with_wrong_gradients_are_refused():
    model = make_model(SETTING, SHAPE, 30)

    def wrong(model, logps, rollout, kernels):
        values, *gradients = step(model, logps, rollout, "reference")
        gradients[-1] = gradients[-1] * 1.01
        return values, *gradients

    with pytest.raises(WrongKernelError, match="relative error of the gradients"):
        check(SETTING, model, SHAPE, 24, 8, wrong)
