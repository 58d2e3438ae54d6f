import pytest
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, parse_config
from tests.config.asking import asked, refusal
from tests.tiers import every_nth

MISTAKES = [
    (
        ["fabric.precision=bf16-true"],
        "fabric.precision=bf16-true rounds small updates of the weights",
    ),
    (
        ["fabric.precision=bf16-true", "stages=[rl]", "roles=ppo"],
        "fabric.precision=bf16-true rounds small updates of the weights that roles.layout=ppo trains",
    ),
    (
        ["correction=tis", "correction.bypass_mode=true", "distillation=none"],
        "correction.bypass_mode=true takes the sampler's log-probs for π_old, so lit_rlkv.objectives.",
    ),
    (["correction.bypass_mode=abc"], "correction"),
    (["rollout.n_splits=129"], "rollout.n_splits must be"),
    (["seed=abc"], "seed must be a whole number of at least 0 and at most 4294967295, got abc"),
    (["seed=null"], "seed must be a whole number of at least 0 and at most 4294967295, got null"),
    (["seed=1.5"], "seed must be a whole number of at least 0 and at most 4294967295, got 1.5"),
    (["algorithm.max_grad_norm=0"], "algorithm.max_grad_norm must be a number above 0 or null, got 0"),
    (["sft.max_grad_norm=0"], "sft.max_grad_norm must be a number above 0 or null, got 0"),
    (["sft.max_grad_norm=abc"], "sft.max_grad_norm must be a number above 0 or null, got abc"),
    (
        ["experiment=tis", "correction.weight_fn.cap=abc"],
        "correction.weight_fn.cap must be a number above 0, got abc; it bounds a ratio of probabilities",
    ),
    (
        ["experiment=tis", "correction.weight_fn.cap=-1"],
        "correction.weight_fn.cap must be a number above 0, got -1; it bounds a ratio of probabilities",
    ),
    (
        ["experiment=tis", "correction.weight_fn.cap=0"],
        "correction.weight_fn.cap must be a number above 0, got 0; it bounds a ratio of probabilities",
    ),
    (
        ["experiment=mis", "correction.weight_fn.low=3"],
        "correction.weight_fn.low must be below correction.weight_fn.high=2.0, got 3; ",
    ),
    (["stages=[rl,rl]"], "stages=[rl, rl] names a stage twice; name each once"),
    (
        ["optimizer.betas=0.9"],
        "optimizer: torch.optim.AdamW does not take lr=0.001, betas=0.9, weight_de",
    ),
    (["sft.optimizer.betas=[2,3]"], "sft.optimizer: torch.optim.AdamW does not take"),
    (["evaluation.budgets=14"], "evaluation.budgets must be a list"),
    (["evaluation.budgets=null"], "evaluation.budgets must be a list"),
    (["task.n_terms=abc"], "task.n_terms must be a whole number, got abc"),
    (["task.n_terms=2.5"], "task.n_terms must be a whole number, got 2.5"),
    (["distillation.anchor_weight=abc"], "distillation.anchor_weight must be a number, got abc"),
    (
        ["algorithm.kl.weight=0.1", "algorithm.kl.target=abc"],
        "algorithm.kl.target must be a number above 0 or null, got abc",
    ),
    (
        ["algorithm.kl.bias_correction=true", "algorithm.kl.estimator=k2"],
        "algorithm.kl.bias_correction=true corrects k3 in the loss, got algorithm.kl.place=loss and ",
    ),
    (
        ["algorithm.kl.bias_correction=true", "algorithm.kl.place=reward"],
        "algorithm.kl.bias_correction=true corrects k3 in the loss, got algorithm.kl.place=reward and ",
    ),
    (["algorithm.entropy_coef=-1"], "algorithm.entropy_coef must be a number of at least 0, got -1"),
    (
        ["algorithm.loss.delta=1.1"],
        "lit_rlkv.modules.grpo.GRPO: delta must be above 1 + clip_high = 1.2, got 1.1",
    ),
    (
        ["algorithm.loss.importance_sampling_level=group"],
        "lit_rlkv.modules.grpo.GRPO: importance_sampling_level='group' is unknown",
    ),
    (["algorithm=cispo", "+algorithm.loss.delta=4"], "lit_rlkv.modules.grpo.CISPO: unexpected 'delta'"),
    (
        ["correction=sequence_mis", "correction.bypass_mode=true"],
        "correction.bypass_mode=true takes the sampler's log-probs for π_old",
    ),
]


@pytest.mark.parametrize(("overrides", "says"), every_nth(3, MISTAKES))
def test_values_that_would_fail_later_or_never_are_refused(overrides, says):
    assert refusal(*overrides).startswith(says)


def test_turning_off_clipping_is_allowed():
    cfg = asked("algorithm.max_grad_norm=null", "sft.max_grad_norm=null", "evaluation.budgets=[]")
    assert cfg.algorithm.max_grad_norm is cfg.sft.max_grad_norm is None


def test_a_weight_function_of_the_users_own_has_options_of_its_own():
    own = ["correction.weight_fn._target_=mine.soft", "+correction.weight_fn.kind=token"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = parse_config(compose("config", overrides=["experiment=naive", *own]))
    assert cfg.correction.weight_fn.kind == "token"
