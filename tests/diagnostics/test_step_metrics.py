"""A callback's metrics are real numbers with names that a file can hold, or the run ends with a line."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.diagnostics.step_metrics import MetricError, checked_metrics
from lit_rlkv.trainer import train
from tests.hand_built import make_datamodule, make_module, make_roles


class Mine(RLCallback):
    def __init__(self, metrics=None, terms=None):
        self.metrics = metrics or {}
        self.terms = terms or ({}, {})

    def on_iteration_end(self, iteration, n_iterations, metrics):
        metrics.update(self.metrics)

    def loss_terms(self, module, batch, outputs):
        return self.terms


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((value, 3.0) for value in (3, 3.0, np.float32(3), np.array(3), Fraction(3), torch.tensor([3]))),
        *((value, value) for value in (float("inf"), -float("inf"), True)),
        (2**70, 2.0**70),
    ],
)
def test_one_real_number_is_a_metric_whatever_its_type(value, number):
    assert float(checked_metrics(Mine(), {"a": value})["a"]) == number


@pytest.mark.parametrize(
    "value",
    ["3", "high", b"3", 1j, np.complex64(1), torch.tensor(1j), None, 10**400, [], [1, 2], {}, object()],
)
def test_anything_else_is_refused_with_the_callback_and_the_metric(value):
    with pytest.raises(MetricError, match=r"^the metric .a. of Mine must be one real number, got "):
        checked_metrics(Mine(), {"a": value})


@pytest.mark.parametrize("name", [1, None, "", "\udc80", "iteration"])
def test_a_name_that_no_file_can_hold_or_that_is_taken_is_refused(name):
    with pytest.raises(MetricError, match="of a metric of Mine"):
        checked_metrics(Mine(), {name: 1.0})


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (Mine({"score": "high"}), "the metric 'score' of Mine must be one real number, got 'high'"),
        (Mine(terms=({}, {"score": 1j})), "the metric 'score' of Mine must be one real number, got 1j"),
        (Mine(terms=({}, {"loss": torch.zeros(())})), "the name 'loss' of a metric of Mine is used already"),
        (Mine(terms=({"policy_loss": torch.zeros(())}, {})), "the name 'policy_loss' of a metric of Mine is"),
        (Mine({"score": float("nan")}, ({}, {"other": 2})), None),
    ],
)
def test_a_run_ends_at_the_iteration_with_such_a_metric(callback, says):
    roles, rows = make_roles(), []
    module = make_module(roles)
    module.loss_terms = [callback.loss_terms]

    class Last(RLCallback):
        def on_iteration_end(self, iteration, n_iterations, metrics):
            rows.append(dict(metrics))

    def run():
        callbacks, data = [callback, Last()], make_datamodule(roles)
        fabric = Fabric(accelerator="cpu")
        train(fabric, module, data, callbacks=callbacks, n_iterations=1, max_grad_norm=1.0)

    if says is None:
        run()
        assert {type(value) for value in rows[0].values()} == {float}
        assert rows[0]["other"] == 2
    else:
        with pytest.raises(MetricError, match=says):
            run()
        assert rows == []
