import pytest

from tests.config.asking import asked, refusal


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["fabric.precision=bf16-true"],
            "fabric.precision=bf16-true rounds small updates of the weights",
        ),
        (
            ["fabric.precision=bf16-true", "stages=[rl]", "roles=ppo"],
            "fabric.precision=bf16-true rounds small updates of the weights that roles=ppo trains away; use",
        ),
        (["seed=abc"], "seed=abc is no whole number; give one, such as seed=0"),
        (["seed=null"], "seed=None is no whole number"),
        (["seed=1.5"], "seed=1.5 is no whole number"),
        (["algorithm.max_grad_norm=0"], "algorithm.max_grad_norm=0 is not a number above 0"),
        (["sft.max_grad_norm=0"], "sft.max_grad_norm=0 is not a number above 0"),
        (["sft.max_grad_norm=abc"], "sft.max_grad_norm=abc is not a number above 0"),
        (["experiment=tis", "correction.weigh.cap=abc"], "correction.weigh.cap=abc is no number; give one"),
        (["experiment=tis", "correction.weigh.cap=-1"], "correction.weigh.cap=-1 bounds a ratio"),
        (["experiment=tis", "correction.weigh.cap=0"], "correction.weigh.cap=0 bounds a ratio"),
        (
            ["experiment=mis", "correction.weigh.low=3"],
            "correction.weigh.low=3 is not below correction.weigh.h",
        ),
        (["stages=[rl,rl]"], "stages=['rl', 'rl'] names a stage twice; name each once"),
        (
            ["optimizer.betas=0.9"],
            "optimizer: torch.optim.AdamW does not take lr=0.001, betas=0.9, weight_de",
        ),
        (["sft.optimizer.betas=[2,3]"], "sft.optimizer: torch.optim.AdamW does not take"),
        (["evaluation.budgets=14"], "evaluation.budgets=14 is not a list; give a list, such as [14]"),
        (["evaluation.budgets=null"], "evaluation.budgets=None is not a list; give a list, such as [14]"),
        (["task.n_terms=abc"], "task.n_terms=abc is no whole number; give one"),
        (["task.n_terms=2.5"], "task.n_terms=2.5 is no whole number; give one"),
        (["distillation.anchor_weight=abc"], "distillation.anchor_weight=abc is no number; give one"),
        (["algorithm.kl.weight=0.1", "algorithm.kl.target=abc"], "algorithm.kl.target=abc or"),
    ],
)
def test_values_that_would_fail_later_or_never_are_refused(overrides, says):
    assert refusal(*overrides).startswith(says)


def test_what_stops_learning_or_clipping_on_purpose_is_allowed():
    assert asked("optimizer.lr=0").optimizer.lr == 0
    cfg = asked("algorithm.max_grad_norm=null", "sft.max_grad_norm=null", "evaluation.budgets=[]")
    assert cfg.algorithm.max_grad_norm is cfg.sft.max_grad_norm is None
