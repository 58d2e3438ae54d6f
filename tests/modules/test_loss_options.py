"""Options of the policy's loss on a toy run: levels of the ratio, CISPO, delta, entropy, KL correction."""

from functools import partial

import pytest
import torch

from lit_rlkv.config.schema import KLConfig
from lit_rlkv.experience.advantages import GroupAdvantage
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import response_hidden, response_logps_and_entropy
from lit_rlkv.modules.grpo import CISPO, GRPO, TokenLoss
from lit_rlkv.objectives import gains
from lit_rlkv.objectives.corrections import Correction, sequence_truncated
from tests.hand_built import (
    ARMS,
    REPLAY,
    TRUNCATED,
    gradients_of,
    make_datamodule,
    make_module,
    make_optimizer,
    make_roles,
    shift,
)


def moved_on(roles):
    """Move the policy away from the one that has sampled, so that ratios leave the clip range."""
    for name, parameter in roles.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(2.0)


def step_of(correction=REPLAY, aggregation="sequence", **data):
    roles = shift(make_roles())
    datamodule = make_datamodule(roles, correction=correction, aggregation=aggregation, **data)
    batches = list(datamodule.splitter.minibatches(datamodule.collect()))
    moved_on(roles)
    return roles, batches


def make_cispo(roles, **options):
    options = {"clip_low": 1.0, "clip_high": 0.1} | options
    return CISPO(roles, make_optimizer, replays=True, temperature=1.0, **options)


@pytest.mark.parametrize("arm", ["shadow", "tis", "sparse_rl"])
def test_the_loss_of_sequence_ratios_equals_its_definition_under_corrections(arm):
    roles, (batch,) = step_of(ARMS[arm])
    module = make_module(roles, replays=ARMS[arm].replays, importance_sampling_level="sequence")
    found = module.training_step(batch, 0)
    outputs, _, _ = module.policy_terms(batch)
    log_ratio = (outputs.logps - batch.old_logps).detach()
    expected, n_clipped = 0.0, 0
    for row, is_action in enumerate(batch.rollout.response_mask):
        ratio = float(log_ratio[row][is_action].mean().exp())
        for column in is_action.nonzero().flatten().tolist():
            advantage = float(batch.advantages[row, column])
            gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            expected -= float(batch.loss_weight[row, column]) * float(batch.correction[row, column]) * gain
            n_clipped += gain < ratio * advantage
    assert float(found["policy_loss"]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    share = n_clipped / batch.n_response_tokens
    assert float(found["clip_ratio/region_mean"]) == pytest.approx(share, abs=1e-6)
    per_token = make_module(roles, replays=ARMS[arm].replays).training_step(batch, 0)
    assert abs(float(per_token["policy_loss"]) - expected) > 1e-3


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_micro_batches_keep_responses_whole_and_their_gradients_add_up(aggregation):
    found = []
    for tokens_per_pass in (10_000, 40):
        roles, batches = step_of(
            Correction(False, False, sequence_truncated), aggregation, tokens_per_pass=tokens_per_pass
        )
        module = make_module(
            roles, replays=False, importance_sampling_level="sequence", entropy_coef=0.1, clip_high=0.05
        )
        found.append((len(batches), gradients_of(module, batches)))
    (n_whole, whole), (n_cut, cut) = found
    assert (n_whole, n_cut > 3) == (1, True)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3


def test_cispo_on_policy_has_the_gradient_of_grpo_and_differs_after_a_step():
    roles = shift(make_roles())
    data = make_datamodule(roles)
    (batch,) = data.splitter.minibatches(data.collect())
    modules = (make_cispo(roles), make_module(roles))
    cispo, grpo = (gradients_of(module, [batch]) for module in modules)
    for name, gradient in grpo.items():
        torch.testing.assert_close(cispo[name], gradient, rtol=1e-3, atol=1e-5)
    moved_on(roles)
    cispo, grpo = (gradients_of(module, [batch]) for module in modules)
    assert max(float((cispo[name] - grpo[name]).abs().max()) for name in grpo) > 1e-3
    metrics = modules[0].training_step(batch, 0)
    assert float(metrics["clip_ratio/high_mean"]) > 0.01
    assert float(metrics["clip_ratio/low_mean"]) == 0.0


@pytest.mark.parametrize("gain", [gains.dppo_tv, gains.dppo_kl, gains.sapo, gains.gpg, gains.geo_mean])
def test_losses_by_a_gain_have_the_gradient_of_grpo_on_policy_and_add_up_over_micro_batches(gain):
    roles = shift(make_roles())
    found = []
    for tokens_per_pass in (10_000, 40):
        data = make_datamodule(roles, tokens_per_pass=tokens_per_pass)
        batches = list(data.splitter.minibatches(data.collect()))
        module = TokenLoss(roles, make_optimizer, replays=True, temperature=1.0, gain=gain)
        found.append(gradients_of(module, batches))
    grpo = gradients_of(make_module(roles), batches)
    for name, gradient in grpo.items():  # each gain has the gradient A·∇log π at ratio 1
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5)
    moved_on(roles)
    moved = gradients_of(module, batches)
    assert max(float((moved[name] - gradient).abs().max()) for name, gradient in grpo.items()) > 1e-3


@pytest.mark.parametrize(("gain", "between"), [(gains.clip_cov, [-0.2, 9.0]), (gains.kl_cov, None)])
def test_tokens_are_chosen_from_the_whole_rollout_whatever_its_micro_batches(gain, between):
    choose = partial(gains.by_covariance, share=0.2, between=between)
    advantage, chosen, found = GroupAdvantage("grpo", choose=choose), [], []
    for tokens_per_pass in (10_000, 40):
        roles, batches = step_of(tokens_per_pass=tokens_per_pass, advantage=advantage)
        module = TokenLoss(roles, make_optimizer, replays=True, temperature=1.0, gain=gain)
        chosen.append(sum(int(batch.is_chosen.sum()) for batch in batches))
        found.append(gradients_of(module, batches))
        plain = gradients_of(make_module(roles), batches)
    assert chosen[0] == chosen[1] == int(0.2 * batches[0].n_response_tokens)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5)
    assert max(float((found[1][name] - plain[name]).abs().max()) for name in plain) > 1e-3


def test_delta_bounds_what_bad_tokens_cost_and_is_counted():
    roles, (batch,) = step_of()
    bounded, open_ended = (make_module(roles, delta=delta).training_step(batch, 0) for delta in (1.21, None))
    assert float(bounded["clip_ratio/delta_mean"]) > 0.01
    assert float(open_ended["clip_ratio/delta_mean"]) == 0.0
    assert float(bounded["policy_loss"]) < float(open_ended["policy_loss"]) - 1e-4


@pytest.mark.parametrize("rollout", [{}, TRUNCATED], ids=["whole vocabulary", "truncated"])
def test_an_entropy_bonus_is_the_mean_entropy_of_the_counted_tokens_and_raises_it(rollout):
    roles, (batch,) = step_of(aggregation="token", rollout=rollout)
    plain, bonus = (make_module(roles, entropy_coef=coef) for coef in (0.0, 0.5))
    without, found = (module.training_step(batch, 0) for module in (plain, bonus))
    lost = float(without["loss"].detach()) - float(found["loss"].detach())
    assert lost == pytest.approx(0.5 * float(found["entropy"]), rel=1e-4)
    before, after = (gradients_of(module, [batch]) for module in (plain, bonus))
    with torch.no_grad():
        for name, parameter in bonus.named_parameters():
            if name in after:
                parameter -= 1e-3 * (after[name] - before[name])
    assert float(bonus.training_step(batch, 0)["entropy"]) > float(found["entropy"]) + 1e-6


def test_the_kl_of_the_loss_is_multiplied_by_the_ratio():
    roles, (batch,) = step_of(kl=KLConfig(weight=0.5, bias_correction=True))
    plain, corrected = (make_module(roles, kl_bias_correction=on) for on in (False, True))
    outputs, losses, metrics = corrected.policy_terms(batch)
    log_ratio = batch.ref_logps - outputs.logps
    token_kl = (log_ratio.exp() - 1 - log_ratio) * (outputs.logps - batch.old_logps).exp()
    expected = 0.5 * float((token_kl * batch.loss_weight).sum().detach())
    assert float(losses["kl_loss"]) == pytest.approx(expected, rel=1e-4)
    assert abs(float(plain.policy_terms(batch)[1]["kl_loss"].detach()) - expected) > 1e-4
    mean = (token_kl * batch.rollout.response_mask).sum() / batch.n_response_tokens
    assert float(metrics["kl"]) == pytest.approx(float(mean), rel=1e-4)


@pytest.mark.parametrize("correction", [REPLAY, ARMS["naive"]])
def test_the_top_entropy_quantile_chooses_tokens_under_the_learners_view(correction):
    roles = shift(make_roles())
    everything, top = (
        make_datamodule(
            roles,
            correction=correction,
            aggregation="token",
            tokens_per_pass=40,
            advantage=GroupAdvantage("grpo", top_entropy_quantile=share),
        )
        for share in (1.0, 0.25)
    )
    experience = top.collect()
    rollout = experience.rollout
    with torch.no_grad(), acting_as(roles, "policy") as backbone:
        hidden = response_hidden(backbone, rollout, shadow=correction.replays)
        _, entropy = response_logps_and_entropy(backbone, rollout, hidden, 1.0)
    torch.testing.assert_close(experience.entropy, entropy, rtol=1e-4, atol=1e-5)
    assert everything.collect().entropy is None
    chosen, every = (data.splitter.advantage.compute(experience) for data in (top, everything))
    threshold = torch.quantile(experience.entropy[rollout.response_mask], 0.75)
    is_top = (experience.entropy >= threshold) & rollout.response_mask
    assert torch.equal(chosen.advantages, every.advantages * is_top)
    assert is_top.sum() < 0.3 * rollout.response_mask.sum()
    assert torch.equal(chosen.is_counted, every.is_counted)  # denominators are of all tokens
    # The micro-batches of a step have the threshold of the whole rollout.
    batches = list(top.splitter.minibatches(experience))
    n_learned = sum(int((batch.advantages != 0).sum()) for batch in batches)
    assert (len(batches) > 3, n_learned) == (True, int((chosen.advantages != 0).sum()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"importance_sampling_level": "batch"}, "'batch' is unknown; choose one of token, sequence"),
        ({"delta": 1.2}, r"delta must be above 1 \+ clip_high = 1.2, got 1.2"),
        ({"delta": -1.0}, "delta must be a number above 0, got -1.0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        GRPO.check_options(clip_low=0.2, clip_high=0.2, **options)
    GRPO.check_options(clip_low=0.2, clip_high=0.2, delta=4.0, importance_sampling_level="sequence")
