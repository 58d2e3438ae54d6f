import lightning as L
import pytest

from lit_rlkv.callbacks.hooks import RLCallback, check_hooks, loss_terms_of


class Right(RLCallback):
    def on_rollout_end(self, experience):
        pass

    def loss_terms(self, module, batch, outputs):
        return {}, {}

    def on_fit_end(self, trainer, pl_module):
        pass

    def losses(self):
        """Not a hook."""


def with_method(name):
    return type("Mine", (RLCallback,), {name: lambda self, *args: None})()


@pytest.mark.parametrize(
    "callback",
    [
        *map(with_method, ["on_rolout_end", "on_validation_epoch_end", "state_dict", "loss_term"]),
        L.pytorch.callbacks.ModelCheckpoint(),
    ],
)
def test_a_hook_that_nothing_calls_is_refused(callback):
    with pytest.raises(TypeError, match="is never called; hooks are on_fit_start, on_phase_start"):
        check_hooks([callback])


def test_hooks_of_the_loop_are_accepted():
    check_hooks([Right(), RLCallback(), L.Callback()])
    with pytest.raises(TypeError, match=r"must derive from lightning\.Callback, got object"):
        check_hooks(iter([object()]))


def test_callbacks_without_loss_terms_are_left_out():
    adds = Right()
    assert loss_terms_of([with_method("on_fit_end"), adds, RLCallback()]) == [adds.loss_terms]
