import lightning as L
import pytest

from lit_rlkv.callbacks.hooks import RLCallback, check_hooks, loss_terms_of


class Misspelt(RLCallback):
    def on_rolout_end(self, experience):
        raise AssertionError("never called")


class OfAnotherLoop(RLCallback):
    def on_validation_epoch_end(self, trainer, pl_module):
        raise AssertionError("never called")


class Stateful(RLCallback):
    def state_dict(self):
        raise AssertionError("never called")


class Term(RLCallback):
    def loss_term(self, module, batch, outputs):
        raise AssertionError("never called")


class Right(RLCallback):
    def on_rollout_end(self, experience):
        pass

    def loss_terms(self, module, batch, outputs):
        return {}, {}

    def on_fit_end(self, trainer, pl_module):
        pass

    def losses(self):
        """Not a hook."""


@pytest.mark.parametrize(
    "callback", [Misspelt(), OfAnotherLoop(), Stateful(), Term(), L.pytorch.callbacks.ModelCheckpoint()]
)
def test_a_hook_that_nothing_calls_is_refused(callback):
    with pytest.raises(TypeError, match="is never called; hooks are on_fit_start, on_phase_start"):
        check_hooks([callback])


def test_hooks_of_the_loop_are_accepted():
    check_hooks([Right(), RLCallback(), L.Callback()])
    with pytest.raises(TypeError, match=r"must derive from lightning\.Callback, got object"):
        check_hooks(iter([object()]))


def test_callbacks_without_loss_terms_are_left_out():
    class Nothing(RLCallback):
        pass

    adds = Right()
    assert loss_terms_of([Nothing(), adds, RLCallback()]) == [adds.loss_terms]
