import pytest
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, parse_config
from tests.config.asking import asked, refusal
from tests.tiers import every_nth

MISTAKES = [
    (["fabric.precision=bf16-true"], "fabric.precision=bf16-true"),
    (["fabric.precision=bf16-true", "stages=[rl]", "roles=ppo"], "roles.layout=ppo"),
    (["fabric.precision=bf16-true", "stages=[rl]", "roles=full"], "that roles=full ("),
    (["roles.layout=full"], "roles=full trains all weights"),
    (["correction=tis", "correction.bypass_mode=true", "distillation=none"], "correction.bypass_mode=true"),
    (["correction=sequence_mis", "correction.bypass_mode=true"], "correction.bypass_mode=true"),
    (["correction.bypass_mode=abc"], "correction.bypass_mode"),
    (["rollout.n_splits=129"], "rollout.n_splits"),
    *(([f"seed={value}"], f"seed must be a whole number of at least 0 and at most 4294967295, got {value}")
      for value in ("abc", "null", "1.5")),
    *(([f"{stage}.max_grad_norm={value}"], f"{stage}.max_grad_norm must be a number above 0 or null, got")
      for stage in ("algorithm", "sft") for value in ("0", "abc")),
    *(([f"{stage}optimizer.lr={value}"], f"{stage}optimizer.lr must be a number above 0, got {value}")
      for stage in ("", "sft.") for value in ("0", "abc")),
    *((["experiment=tis", f"correction.weight_fn.cap={value}"], "correction.weight_fn.cap")
      for value in ("abc", "-1", "0")),
    (["experiment=mis", "correction.weight_fn.low=3"], "correction.weight_fn.low"),
    (["optimizer.betas=0.9"], "optimizer: torch.optim.AdamW"),
    (["sft.optimizer.betas=[2,3]"], "sft.optimizer: torch.optim.AdamW"),
    (["evaluation.budgets=14"], "evaluation.budgets must be a list"),
    (["evaluation.budgets=null"], "evaluation.budgets must be a list"),
    (["task.n_terms=abc"], "task.n_terms must be a whole number, got abc"),
    (["task.n_terms=2.5"], "task.n_terms must be a whole number, got 2.5"),
    (["distillation.anchor_weight=abc"], "distillation.anchor_weight must be a number, got abc"),
    (["algorithm.kl.weight=0.1", "algorithm.kl.target=abc"], "algorithm.kl.target"),
    (["algorithm.kl.weight=0.1", "algorithm.kl.estimator=k1"], "estimator=k1"),
    (["algorithm.kl.bias_correction=true", "algorithm.kl.estimator=k2"], "algorithm.kl.bias_correction=true"),
    (["algorithm.kl.bias_correction=true", "algorithm.kl.place=reward"], "algorithm.kl.bias_correction=true"),
    (["algorithm.entropy_coef=-1"], "algorithm.entropy_coef"),
    (["algorithm.loss.delta=1.1"], "delta"),
    (["algorithm.loss.importance_sampling_level=group"], "importance_sampling_level"),
    (["algorithm=cispo", "+algorithm.loss.delta=4"], "'delta'"),
    (["algorithm=sapo", "algorithm.loss.gain.tau_pos=-1"], "tau_pos must be"),
    (["algorithm=kl_cov", "algorithm.advantage.choose.share=2"], "share must be"),
    (["algorithm=gdpo", "reward.normalize=batch"], "gdpo scales each part"),
    (["algorithm=remax", "reward.normalize=batch"], "greedy_baseline compares"),
    (["algorithm=gdpo", "algorithm.kl.weight=1", "algorithm.kl.place=reward"], "gdpo scales each part"),
    (["distillation=teacher", "distillation.model=x/y", "distillation.beta=2"], "beta must be"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "says"), every_nth(3, MISTAKES))
def test_values_that_would_fail_later_or_never_are_refused(overrides, says):
    assert says in refusal(*overrides)


def test_turning_off_clipping_is_allowed():
    cfg = asked("algorithm.max_grad_norm=null", "sft.max_grad_norm=null", "evaluation.budgets=[]")
    assert cfg.algorithm.max_grad_norm is cfg.sft.max_grad_norm is None


def test_a_weight_function_of_the_users_own_has_options_of_its_own():
    own = ["correction.weight_fn._target_=mine.soft", "+correction.weight_fn.kind=token"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = parse_config(compose("config", overrides=["experiment=naive", *own]))
    assert cfg.correction.weight_fn.kind == "token"
