from dataclasses import dataclass, replace

import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.callbacks.gradient_sources import GradientSources
from lit_rlkv.callbacks.gradient_variance import GradientVariance, algorithm_loss, policy_outputs
from lit_rlkv.config.schema import KLConfig
from lit_rlkv.diagnostics.covariance import PartGradients
from lit_rlkv.experience.advantages import GroupAdvantage, PairAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.models.hydra import acting_as
from tests.callbacks.gradients import Run, make_run, measured, square_of, trained_square
from tests.hand_built import (
    SPEC,
    TRUNCATED,
    counted_forwards,
    make_datamodule,
    with_rewards,
)
from tests.tiers import every_nth

RUNS = [
    ("grpo", {}),
    ("grpo", {"arm": "sparse_rl"}),
    ("grpo", {"layout": "ppo"}),
    ("grpo", {"checkpoints": True, "distils": True}),
    ("grpo", {"layout": "ppo", "distils": True}),
    ("grpo", {"distils": True, "layout": "ppo", "checkpoints": True}),
    ("grpo", {"kl": KLConfig(weight=0.3), "arm": "naive"}),
    ("grpo", {"arm": "tis", "distils": True, "rollout": {"n_prompts": 8} | TRUNCATED}),
    ("ppo", {"layout": "dynamic_lora"}),
    ("ppo", {"layout": "j_hydra", "arm": "tis", "checkpoints": True}),
    ("ppo", {"layout": "lora_ppo"}),
    ("online_dpo", {"distils": True, "advantage": PairAdvantage(drop_ties=False)}),
    ("online_dpo", {"arm": "mis"}),
    ("grpo", {"arm": "sparse_rl", "aggregation": "token", "mask_truncated": True}),
    ("grpo", {"aggregation": "token", "distils": True, "mask_truncated": True}),
    ("grpo", {"aggregation": "constant", "distils": True}),
    ("grpo", {"advantage": GroupAdvantage("dapo", filter_zero_std_groups=True), "aggregation": "token"}),
    (
        "grpo",
        {
            "advantage": GroupAdvantage("dapo", filter_zero_std_groups=True),
            "aggregation": "token",
            "distils": True,
        },
    ),
]


@pytest.mark.parametrize(("algorithm", "options"), every_nth(2, RUNS))
def test_the_sum_over_the_parts_is_the_gradient_that_training_takes(algorithm, options):
    run = make_run(algorithm, **options)
    found = measured(GradientVariance(every=1, n_parts=4), run)
    assert square_of(found) == pytest.approx(trained_square(run), rel=1e-3)
    other = replace(run, experience=run.data.collect())
    assert square_of(found) != pytest.approx(trained_square(other), rel=1e-3)


def test_distillation_counts_the_prompts_that_the_policys_loss_drops():
    run = make_run(advantage=GroupAdvantage("dapo", filter_zero_std_groups=True), distils=True)
    total = [1.0] * 12 + [0.0, 1.0, 2.0, 3.0] * 5  # three groups of eight agree
    run = replace(run, experience=with_rewards(run.experience, total))
    diagnostic = GradientVariance(every=1)
    found = measured(diagnostic, run)
    assert diagnostic.arrays["loss"]["n_prompts"] == 8
    assert diagnostic.arrays["policy"]["n_prompts"] == 5
    assert square_of(found) == pytest.approx(trained_square(run), rel=1e-3)


def test_a_single_prompt_has_nothing_to_compare_and_costs_no_forward():
    run = make_run(rollout={"n_prompts": 1})
    with counted_forwards(run.module.roles) as forwards:
        assert measured(GradientVariance(every=1), run) == {}
        assert measured(GradientSources(every=1, counterfactual="tis"), run) == {}
        assert not forwards
        measured(GradientVariance(every=1), make_run())
    run = make_run(rollout={"n_prompts": 2})
    with counted_forwards(run.module.roles) as forwards:
        assert "gradient/loss/variance" in measured(GradientVariance(every=1), run)
        assert forwards


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_gradients_are_taken_as_training_takes_them_in_every_precision(precision: str):
    run = make_run()
    fabric = Fabric(accelerator="cpu", precision=precision)
    if precision == "bf16-true":
        run.module.bfloat16()
    model, _ = fabric.setup(run.module, run.module.configure_optimizers()["optimizer"])
    (batch,) = run.data.splitter.minibatches(run.experience)
    with fabric.autocast():
        loss = model.training_step(batch, 0)["loss"]
    fabric.backward(loss)
    named = {name: p for name, p in run.module.named_parameters() if p.grad is not None}
    expected = {name: p.grad.flatten().float() for name, p in named.items()}
    run.module.zero_grad()
    diagnostic = GradientVariance(every=1, terms=["loss"], blocks="all")
    diagnostic.on_fit_start(None, run.module)
    with fabric.autocast():
        with torch.no_grad():  # leaves casts of the weights behind that know nothing of gradients
            run.module.training_step(batch, 0)
        found, _ = diagnostic.gradients_of_batch(batch)
    assert torch.equal(found["loss"]["all"], torch.cat([expected[name] for name in diagnostic.parameters]))
    assert found["loss"]["all"].abs().max() > 1e-3


def test_float16_activations_give_the_gradient_of_float32_nearly():
    run = make_run()
    (batch,) = run.data.splitter.minibatches(run.experience)
    tiny = replace(batch, loss_weight=batch.loss_weight * 2.0**-18)
    diagnostic = GradientVariance(every=1, terms=["policy"], blocks="all")
    diagnostic.on_fit_start(None, run.module)
    expected = diagnostic.gradients_of_batch(tiny)[0]["policy"]["all"]
    with torch.autocast("cpu", torch.float16):
        found = diagnostic.gradients_of_batch(tiny)[0]["policy"]["all"]
        unscaled = policy_outputs(run.module, tiny, shadow=True)
    algorithm_loss(run.module, tiny, unscaled).backward()
    lost = torch.cat([parameter.grad.flatten() for parameter in diagnostic.parameters.values()])
    run.module.zero_grad()
    error, error_without = ((g - expected).norm() / expected.norm() for g in (found, lost))
    assert error < 0.1
    assert error_without > 2 * error  # what a loss that is not scaled loses


def test_no_forward_is_larger_than_those_of_training_and_none_changes_the_result():
    run = make_run(n_minibatches=2)
    split = replace(run, data=make_datamodule(run.module.roles, n_minibatches=2, tokens_per_pass=64))
    sizes: list[int] = []
    embedding = run.module.roles.backbone("policy").get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, args, output: sizes.append(args[0].numel()))
    for batch in split.data.splitter.minibatches(run.experience):
        run.module.policy_terms(batch)
    assert 48 < max(sizes) <= 64
    sizes.clear()
    found = measured(GradientVariance(every=1, n_parts=3), split)
    assert max(sizes) <= 64
    sizes.clear()
    measured(GradientSources(every=1, n_parts=3, counterfactual="tis"), split)
    assert max(sizes) <= 64
    sizes.clear()
    expected = measured(GradientVariance(every=1, n_parts=3), run)
    assert max(sizes) > 64  # twelve responses at once, each prompt of them once
    handle.remove()
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_policys_own_term_is_that_of_a_run_without_distillation():
    plain, distilled = make_run(), make_run(distils=True)
    expected = measured(GradientVariance(every=1), plain)
    found = measured(GradientVariance(every=1), distilled)
    alone = measured(GradientVariance(every=1, terms=["policy"]), distilled)
    for name, value in expected.items():
        if name.startswith("gradient/policy/"):
            assert found[name] == pytest.approx(value, rel=1e-4)
            assert alone[name] == pytest.approx(value, rel=1e-4)
            assert expected[name.replace("policy", "loss")] == value
    assert not any(name.startswith("gradient/loss") for name in alone)
    of_loss = measured(GradientVariance(every=1, terms=["loss"]), distilled)
    assert "variance_proxy/proxy1_signal_strength" not in of_loss
    assert "variance_proxy/proxy2_total_power" in of_loss
    assert found["gradient/loss/variance"] != pytest.approx(found["gradient/policy/variance"], rel=1e-2)
    assert found["variance_proxy/proxy1_signal_strength"] == pytest.approx(square_of(alone, "policy"))


def test_the_weight_of_the_algorithm_scales_its_term():
    run = make_run(distils=True)
    before = measured(GradientVariance(every=1), run) | measured(GradientSources(every=1), run)
    run.module.policy_weight = 0.5
    after = measured(GradientVariance(every=1), run) | measured(GradientSources(every=1), run)
    for name in ("gradient/policy/variance", "gradient/sources/total", "gradient/sources/sampling"):
        assert after[name] == pytest.approx(before[name] / 4, rel=1e-4)
    assert after["gradient/loss/variance"] > 1.01 * before["gradient/loss/variance"] / 4


def test_blocks_and_chosen_parameters_are_shares_of_the_whole():
    run = make_run()
    by_layer = measured(GradientVariance(every=1, terms=["policy"]), run)
    whole = by_layer["gradient/policy/variance"]
    layers = [by_layer[f"gradient/policy/layer_{layer}/variance"] for layer in (0, 1)]
    assert sum(layers) == pytest.approx(whole)
    by_module = measured(GradientVariance(every=1, terms=["policy"], blocks="module"), run)
    modules = [v for name, v in by_module.items() if name.count("/") == 3 and name.endswith("/variance")]
    assert len(modules) == 14  # A and B of seven projections
    assert sum(modules) == pytest.approx(whole)
    last = measured(GradientVariance(every=1, terms=["policy"], only=r"layers\.1\."), run)
    assert last["gradient/policy/variance"] == pytest.approx(layers[1])
    assert "variance_proxy/proxy1_signal_strength" not in last  # of the whole gradient, which nobody saw
    assert last["variance_proxy/expected_w"] == by_layer["variance_proxy/expected_w"]


def test_a_part_in_which_nothing_counts_is_no_part():
    run = make_run(advantage=GroupAdvantage("dapo", filter_zero_std_groups=True))
    experience = with_rewards(run.experience, [0.0] * 16 + [0.0, 1.0, 2.0, 3.0] * 4)
    diagnostic = GradientVariance(every=1, n_parts=4, terms=["policy"])
    found = measured(diagnostic, run, experience)
    assert diagnostic.arrays["policy"]["n_prompts"] == 4
    assert found["gradient/policy/variance"] > 0
    lone = with_rewards(run.experience, [0.0] * 28 + [0.0, 1.0, 2.0, 3.0])
    assert not any("gradient" in name for name in measured(diagnostic, run, lone))


def test_a_critic_and_pairs_have_no_proxies_that_they_should_not():
    assert "variance_proxy/proxy2_total_power" in measured(GradientVariance(every=1), make_run("ppo"))
    found = measured(GradientVariance(every=1), make_run("online_dpo"))
    assert not any(name.startswith("variance_proxy") for name in found)
    assert found["gradient/policy/variance"] > 0


def test_the_proxies_are_of_what_counts_by_its_weights_at_the_temperature():
    run = make_run(arm="tis", mask_truncated=True)
    run.module.temperature = 1.7
    (batch,) = (b for part in run.data.splitter.parts(run.experience, 1) for b in part.batches)
    is_counted = batch.loss_weight != 0
    assert (is_counted != batch.rollout.response_mask).any()
    assert (batch.correction[is_counted] != 1).any()
    outputs = policy_outputs(run.module, batch, shadow=False)
    with torch.no_grad(), acting_as(run.module.roles, "policy") as backbone:
        logits = backbone.get_output_embeddings()(outputs.hidden).float()
    probs = (logits / 1.7).softmax(-1)
    squares = torch.zeros_like(outputs.logps).masked_scatter(
        batch.rollout.response_mask, probs.square().sum(dim=1)
    )
    energy = (1 - 2 * outputs.logps.detach().exp() + squares) * batch.correction.square() * is_counted
    expected = float(energy.sum(dim=1).mean())
    found = measured(GradientVariance(every=1, n_parts=3), run)["variance_proxy/expected_w"]
    assert found == pytest.approx(expected, rel=1e-4)


def on_a_rank(fabric: Fabric, run: Run) -> list[float]:
    """Return the report of each rank if the parts are split over ranks."""

    def dealt(experience: Experience, n_parts: int):
        yield from list(run.data.splitter.parts(experience, n_parts))[fabric.global_rank :: fabric.world_size]

    alone = replace(run, data=_Dealing(dealt))
    found = measured(GradientVariance(every=1, n_parts=4), alone)
    more = measured(GradientSources(every=1, n_parts=4), alone)
    return [(found | more)[name] for name in SHARED]


@dataclass
class _Dealing:
    parts: object

    @property
    def splitter(self) -> "_Dealing":
        return self


SHARED = (
    "gradient/policy/variance", "gradient/loss/signal", "gradient/policy/layer_1/variance",
    "gradient/loss/noise_scale", "variance_proxy/expected_w", "variance_proxy/proxy3_pure_noise",
    "gradient/sources/sampling", "gradient/sources/reweighting",
)  # fmt: skip


def test_two_ranks_with_half_of_the_parts_each_report_what_one_finds_in_all():
    run = make_run(arm="tis", distils=True)
    both = measured(GradientVariance(every=1, n_parts=4), run)
    both |= measured(GradientSources(every=1, n_parts=4), run)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    found = dict(zip(SHARED, fabric.launch(on_a_rank, run), strict=True))
    assert found == pytest.approx({name: both[name] for name in SHARED}, rel=1e-3)


@pytest.mark.slow
def test_it_agrees_with_brute_force_over_fresh_rollouts():
    run = make_run("grpo", "tis", rollout={"n_prompts": 6}, spec=SPEC)
    estimates, fresh = [], PartGradients()
    diagnostic = GradientVariance(every=1, n_parts=6, terms=["policy"], blocks="all")
    diagnostic.on_fit_start(None, run.module)
    for iteration in range(40):
        run.data.iteration = iteration
        experience = run.data.collect()
        found = measured(diagnostic, run, replace(experience, iteration=0))
        estimates.append(found["gradient/policy/variance"])
        (part,) = run.data.splitter.parts(experience, 1)
        fresh.add(diagnostic.gradients_of_batch(part.batches[0])[0]["policy"], 1)
    brute = fresh.spread()
    mean, error = torch.tensor(estimates).mean(), torch.tensor(estimates).std() / len(estimates) ** 0.5
    # each rollout is one prompt of `fresh`, so that tr Σ is the variance of a rollout's gradient
    expected, its_error = float(brute.per_prompt.sum()), brute.variance_se * brute.n_prompts
    tolerance = 3 * (error**2 + its_error**2) ** 0.5
    assert tolerance < 0.4 * expected
    assert abs(mean - expected) < tolerance
    assert abs(6 * mean - expected) > tolerance  # the variance of one prompt's gradient is another
