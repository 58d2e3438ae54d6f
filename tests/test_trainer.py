import copy

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.callbacks.shadow_distillation import ShadowDistillation
from lit_rlkv.config.schema import KLConfig
from lit_rlkv.diagnostics.step_metrics import MetricSums
from lit_rlkv.models.layouts import ROLES
from lit_rlkv.runs.checkpoint import CheckpointDir, load_trainable, trainable_weights
from lit_rlkv.trainer import Learner, train
from tests.hand_built import make_datamodule, make_module, make_ppo, make_roles, steps_of
from tests.modules.ppo_by_definition import make_data


class LossLog(L.Callback):
    """Losses as lightning.Trainer reports them."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


class MetricLog(RLCallback):
    def __init__(self):
        self.rows = []

    def on_iteration_end(self, iteration, n_iterations, metrics):
        self.rows.append(dict(metrics))


def make_run(**update):
    roles = make_roles()
    module = make_module(roles)
    module.loss_terms = [ShadowDistillation("sparse_student", 0.3, "reference").loss_terms]
    return module, make_datamodule(roles, kl=KLConfig(weight=0.1), **update)


def train_here(module, datamodule, n_iterations, **options):
    log = MetricLog()
    fabric = Fabric(accelerator="cpu")
    train(
        fabric, module, datamodule, callbacks=[log], n_iterations=n_iterations, max_grad_norm=1.0, **options
    )
    return log.rows


def parameters_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def test_lightning_trainer_gives_the_same_losses_and_weights():
    module, datamodule = make_run()
    ours = [row["loss"] for row in train_here(module, datamodule, 3)]

    twin, twin_data = make_run()
    log = LossLog()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[log],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(twin, twin_data)

    assert len(set(ours)) == 3
    assert log.losses == pytest.approx(ours, abs=1e-7)
    for name, value in parameters_of(module).items():
        torch.testing.assert_close(value, parameters_of(twin)[name], rtol=0, atol=1e-7)


def test_a_precision_that_rounds_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match=r"'bf16-true'.* load the backbone in that precision"):
        Learner(Fabric(accelerator="cpu", precision="bf16-true"), make_run()[0], [], 1.0, None)


def test_several_processes_of_lightning_trainer_are_refused():
    module, datamodule = make_run()
    module.trainer = L.Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    batch = next(iter(datamodule.train_dataloader()))
    with pytest.raises(ValueError, match="must run 1 process, got 2: each would sample the same"):
        module.training_step(batch, 0)


def test_micro_batches_do_not_change_the_update():
    whole, data = make_run(n_minibatches=2)
    cut = {"n_minibatches": 2, "tokens_per_pass": 48}  # three responses of up to 16 tokens
    assert [len(step) >= 2 for step in steps_of(make_run(**cut)[1].train_dataloader())] == [True, True]
    split, split_data = make_run(**cut)
    rows, split_rows = train_here(whole, data, 2), train_here(split, split_data, 2)
    for name in ("loss", "policy_loss", "kl", "entropy", "smd/kl"):
        assert split_rows[-1][name] == pytest.approx(rows[-1][name], abs=1e-5), name
    for name, value in parameters_of(whole).items():
        torch.testing.assert_close(value, parameters_of(split)[name], rtol=0, atol=1e-5)


def test_another_seed_changes_the_update():
    first, data = make_run()
    second, other = make_run(seed=1)
    assert train_here(first, data, 1)[0]["loss"] != train_here(second, other, 1)[0]["loss"]


def test_three_iterations_and_three_more_after_a_resume_equal_six(tmp_path):
    checkpoints = CheckpointDir(tmp_path)

    def saver(module, datamodule):
        def save(moment):
            # A kill can come right after this, so what is written must already be everything.
            state = copy.deepcopy(moment.learner_state())
            checkpoints.save(moment.iteration, trainable_weights(module), state, moment.data_state)

        return save

    straight, data = make_run()
    six = train_here(straight, data, 6)

    module, data = make_run()
    train_here(module, data, 3, save=saver(module, data))
    module, data = make_run()
    saved = checkpoints.latest()
    load_trainable(module, saved.weights())
    data.load_state_dict(saved.data_state)
    rest = train_here(module, data, 6, first_iteration=saved.iteration, learner_state=saved.learner_state())

    assert saved.iteration == 3
    assert [row["loss"] for row in rest] == [row["loss"] for row in six[3:]]
    for name, value in parameters_of(straight).items():
        assert torch.equal(value, parameters_of(module)[name]), name


def test_a_resume_without_the_prompt_cursor_is_caught():
    module, data = make_run()
    six = train_here(module, data, 2)
    module, data = make_run()
    train_here(module, data, 1)
    data.source.load_state_dict({**data.source.state_dict(), "cursor": 0})
    assert train_here(module, data, 2, first_iteration=1)[0]["loss"] != six[1]["loss"]


@pytest.mark.parametrize(("bound", "is_clipped"), [(None, False), (1e-3, True)])
def test_without_a_bound_gradients_are_not_clipped_and_their_norm_is_logged(bound, is_clipped):
    norms, log = [], MetricLog()

    class Norms(RLCallback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            squares = [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
            norms.append(float(torch.stack(squares).sum().sqrt()))

    module, datamodule = make_run()
    fabric = Fabric(accelerator="cpu")
    train(fabric, module, datamodule, callbacks=[log, Norms()], n_iterations=1, max_grad_norm=bound)
    logged = log.rows[0]["grad_norm"]
    assert logged > 1e-2
    assert sum(norms) / len(norms) == pytest.approx(1e-3 if is_clipped else logged, rel=1e-2)


def test_a_linear_rate_ends_at_0_also_where_steps_are_left_out():
    rates = {}
    for is_cut in (False, True):
        module, datamodule = make_run(n_minibatches=4, tokens_per_pass=96)
        module.n_decay_steps = 8
        if is_cut:
            module.on_train_batch_start = lambda batch, index: -1 if batch.n_steps_done > 2 else None
        rates[is_cut] = [row["learning_rate"] for row in train_here(module, datamodule, 2)]
    assert rates[True] == rates[False]
    assert rates[True][-1] == 0


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_group_of_one_leaves_weights_that_do_not_learn_alone(group_of_one):
    roles = make_roles("hydra", ROLES)
    module = make_ppo(roles)
    parts = {"learner_parts": module.learner_parts, "warmup_part": module.warmup_part}
    data = make_data(roles, critic_warmup=1, **parts)
    learner = Learner(Fabric(accelerator="cpu"), module, [], 1.0, None)
    for index, batch in enumerate(data.train_dataloader()):
        learner.learn(batch, index)
    stepped = {id(parameter) for parameter in learner.optimizer.state}
    assert stepped
    assert not stepped & {id(parameter) for parameter in roles.trained_parameters("policy")}


def test_metrics_add_up_over_micro_batches_and_average_over_steps():
    sums = MetricSums()
    for loss, gap in ((1.0, 0.3), (2.0, 0.1)):
        sums.add({"loss": torch.tensor(loss), "kv/replay_gap": torch.tensor(gap)})
    sums.end_step(torch.tensor(5.0), is_finite=True)
    sums.add({"loss": torch.tensor(1.0)})
    sums.end_step(torch.tensor(7.0), is_finite=True)
    sums.add({"loss": torch.tensor(torch.nan)})
    sums.end_step(torch.tensor(torch.nan), is_finite=False)
    # steps: 1 + 2 = 3 and 1, mean 2; the gap is the larger one, and only the first step reported it;
    # the third was left out
    expected = {"loss": 2.0, "kv/replay_gap": 0.3, "grad_norm": 6.0, "skipped_steps": 1.0}
    assert sums.means(Fabric(accelerator="cpu")) == pytest.approx(expected)


def test_the_first_minibatch_of_replay_has_ratio_one_and_clips_nothing():
    module, data = make_run()
    row = train_here(module, data, 1)[0]
    assert row["kv/replay_gap"] < 1e-4
    assert row["clip_ratio/region_mean"] == 0.0


def test_callbacks_are_called_when_an_update_begins_and_ends():
    heard = []

    class Listener(RLCallback):
        def on_phase_start(self, phase, iteration):
            heard.append(("start", phase, iteration))

        def on_phase_end(self, phase, iteration):
            heard.append(("end", phase, iteration))

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            heard.append("step")

        def on_iteration_end(self, iteration, n_iterations, metrics):
            heard.append("report")

    module, datamodule = make_run(n_minibatches=2)
    fabric = Fabric(accelerator="cpu")
    train(fabric, module, datamodule, callbacks=[Listener()], n_iterations=2, max_grad_norm=1.0)
    assert heard == [
        what
        for iteration in (0, 1)
        for what in (("start", "update", iteration), "step", "step", ("end", "update", iteration), "report")
    ]


def test_progress_of_an_update_rises_with_every_micro_batch_from_0_to_its_steps():
    heard = []

    class Listener(RLCallback):
        def on_phase_progress(self, phase, n_done, n_total):
            heard.append((phase, n_done, n_total))

        def on_iteration_end(self, iteration, n_iterations, metrics):
            heard.append("report")

    module, datamodule = make_run(n_minibatches=2, tokens_per_pass=96)
    fabric = Fabric(accelerator="cpu")
    train(fabric, module, datamodule, callbacks=[Listener()], n_iterations=2, max_grad_norm=1.0)
    first, second = (heard[: heard.index("report")], heard[heard.index("report") + 1 : -1])
    for reports in (first, second):
        done = [n_done for phase, n_done, n_total in reports if (phase, n_total) == ("update", 2)]
        assert len(done) == len(reports) > 3
        assert done == sorted(set(done))
        assert (done[0], done[-1]) == (0, 2)
        assert 1 in done


def test_under_mixed_precision_the_learner_computes_in_the_precision_of_the_sampler():
    module, datamodule = make_run()
    seen, log = [], MetricLog()

    def watch(module, batch, outputs):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")))
        return {}, {}

    module.loss_terms = [*module.loss_terms, watch]
    before = parameters_of(module)
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    train(fabric, module, datamodule, callbacks=[log], n_iterations=1, max_grad_norm=1.0)
    assert seen
    assert all(on_cpu for on_cpu, _ in seen)
    assert not torch.is_autocast_enabled("cpu")
    after = parameters_of(module)
    assert all(parameter.dtype == torch.float32 for parameter in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in after)
