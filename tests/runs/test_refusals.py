import re

import pytest
import torch
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, ConfigError
from lit_rlkv.runs.checks import try_optimizers
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.trust import trusting
from tests.tiers import every_nth
from tests.whole_runs import composed

MISTAKES = [
    (["distillation.teacher=critic"], "teacher must be one of policy, reference, got 'critic'"),
    (["distillation.weight=0", "distillation.anchor_weight=0"], "must be above 0, got 0 for both"),
    (
        ["experiment=shadow", "algorithm.policy_weight=0"],
        "algorithm.policy_weight=0 leaves the policy nothing",
    ),
    (
        ["callbacks.samples_every=0"],
        "callbacks.samples_every must be a whole number of at least 1, got 0",
    ),
    (["algorithm.group_size=2.5"], "algorithm.group_size must be a whole number of at least 1, got 2.5"),
    (
        ["optimizer.lr=abc"],
        "optimizer.lr must be a number above 0, got abc",
    ),
    (["sft.n_pairs=999"], "sft.n_pairs must be at most sft.batch_size=64, got 999; lower it"),
    (
        ["sft.n_steps=70"],
        "sft.n_steps must be a multiple of sft.steps_per_iteration=50, got 70; change one of them",
    ),
    (["task.n_terms=1"], "n_terms must be a whole number of at least 2 and at most 10000, got 1"),
    (["task=jsonl", "task.path=nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
    (["stages=rl"], "stages must be a list"),
    (["fabric.devices=0"], "fabric.devices must be one of auto, -1 or a whole number of at least 1"),
    (["fabric.num_nodes=two"], "fabric.num_nodes must be a whole number of at least 1, got two"),
    (["fabric.strategy=dp"], "fabric.strategy must be one of auto, ddp, fsdp2, got dp"),
    (["rollout.n_shards=0"], "rollout.n_shards must be a whole number of at least 1 or null, got 0"),
    (["callbacks.keep_last=0"], "callbacks.keep_last must be a whole number of at least 1, got 0"),
    (
        ["callbacks.best_mode=most", "callbacks.keep_best=1"],
        "callbacks.best_mode must be one of max, min, got most",
    ),
    (
        ["algorithm.lr_schedule=cosine"],
        "algorithm.lr_schedule must be one of linear, constant, got cosine",
    ),
    (["model.path='~/no-such-folder'"], "model.path=~/no-such-folder is not a checkpoint folder"),
    (["task._target_=lit_rlkv.runs.checkpoint.torch.load"], "task._target_='lit_rlkv.runs"),
    (["task._target_=lit_rlkv.config.model_path.Path"], "must be a class or function that a config may"),
    (
        ["task._target_=lit_rlkv.rewards.isolated.worker.load"],
        "must be a class or function that a config may",
    ),
    (["task._target_=lit_rlkv.files.write_atomically"], "must be a class or function that a config may"),
    (["cache.budget=4"], "sink + window + 1 = 5, got 4; raise the budget"),
    (["cache.budget=12.5"], "cache.budget must be a whole number of at least 1, got 12.5"),
    (["algorithm.eviction.lr_scale=0"], "algorithm.eviction.lr_scale must be a number above 0, got 0"),
    (
        [
            "experiment=shadow",
            "cache.policy=learned",
            "algorithm.eviction.weight=0",
            "algorithm.policy_weight=0",
        ],
        "algorithm.policy_weight=0 leaves the policy nothing",
    ),
    (["cache.policy=learned", "experiment=naive"], "algorithm.eviction.weight=1.0 learns from evictions"),
    (["cache.policy=learned", "experiment=dense"], "use correction=shadow, or algorithm.eviction.weight=0"),
    (["cache.policy=learned", "+cache.policy_options.hidden=0"], "hidden must be a whole number of at"),
    (
        ["cache.policy=learned", "sft.on_policy_pairs.n_prompts=8"],
        "sft.on_policy_pairs.n_prompts=8 samples under cache.policy=learned, whose scorer is made after SFT",
    ),
    (
        ["sft.eviction_steps=50"],
        "sft.eviction_steps=50 trains the scorer of evictions, and cache.policy=random",
    ),
    (["cache.policy=lru"], "unknown cache policy 'lru'; choose one of dense, streaming"),
    (["evaluation.budgets=[2]"], "got 2; raise the budget"),
    (["rollout.top_p=0"], "rollout.top_p must be a number above 0 and at most 1, got 0"),
    (["rollout.top_k=0"], "rollout.top_k must be a whole number of at least 1 or null, got 0"),
    (["rollout.min_p=1"], "rollout.min_p must be a number of at least 0 and below 1 or null, got 1"),
    (
        ["rollout.temperature=0"],
        "rollout.temperature must be a number of at least 1e-06 and at most 1000000, got 0",
    ),
    (["rollout.max_new_tokens=0"], "rollout.max_new_tokens must be a whole number of at least 1, got 0"),
    (["algorithm.group_size=1"], "algorithm.group_size=1: GroupAdvantage compares"),
    (
        ["algorithm=reinforce++_plain", "algorithm.group_size=1", "algorithm.resample=3"],
        "algorithm.resample=3 replaces groups of equal rewards, which a group of algorithm.group_size=1",
    ),
    (["algorithm.advantage.estimator=gae"], "estimator='gae' is unknown; choose one of grpo"),
    (
        ["algorithm.kl.estimator=k1"],
        "algorithm.kl.estimator=k1 has no useful gradient, so it does not serve in the loss; use k2 or k",
    ),
    (
        ["algorithm.kl.target=6"],
        "algorithm.kl.target=6 steers algorithm.kl.weight, which must be above 0, got 0.0; raise it, or ",
    ),
    (["algorithm=online_dpo", "algorithm.n_minibatches=33"], "cannot be cut from 32 pairs"),
    (["algorithm=online_dpo", "algorithm.loss.kind=hinge"], "kind='hinge'"),
    (["algorithm=online_dpo", "algorithm.kl.place=reward"], "has no meaning for preference pairs"),
    (["algorithm=ppo", "+algorithm.loss.cliprange=1"], "PPO: unexpected 'cliprange'"),
    (["algorithm=ppo", "algorithm.advantage.lam=1.5"], "lam=1.5 is no discount"),
    (["algorithm.loss.clip_low=0"], "clip_low must be a number above 0, got 0"),
    (["reward.verifier=0"], "a reward needs a component with a weight, got verifier=0, learned=0"),
    (["reward.accuracy=correct"], "accuracy must name one of the functions (none) or be environment"),
    (["reward.max_failed=2"], "reward.max_failed must be a number of at least 0 and at most 1, got 2"),
    (
        ["+reward.functions.a={weight: 1}"],
        "reward.functions.a must name its class or function in _target_, got null",
    ),
    (
        ["+reward.functions.a={_target_: lit_rlkv.tasks.ChainSum}"],
        "reward.functions.a._target_ must be",
    ),
    (
        ["+reward.functions.a={_target_: lit_rlkv.rewards.Regex, pattern: '('}"],
        "reward.functions.a: lit_rlkv.rewards.Regex: pattern must be a regular expression, got '('",
    ),
    (["+reward.functions.a={_target_: os.system}"], "is not from a trusted package"),
    (
        ["reward=python", "reward.functions.custom.path=a.py"],
        "path must name a function as path/to/file.py:function, got 'a.py'",
    ),
    (
        ["reward=endpoint", "reward.functions.custom.url=file:///etc/passwd"],
        "url must be an address with http",
    ),
    (
        ["task=dataset", "task.dataset=tests/data/problems.jsonl", "task.prompt_column=question"],
        "no column 'question', it has prompt, answer; set prompt_column",
    ),
    (
        ["task=dataset", "task.dataset=tests/data/problems.jsonl", "task.answer_column=null"],
        "reward.verifier=1.0: Problems cannot verify answers, as with preferences, or answers wit",
    ),
    (["reward.normalize=yes"], "reward.normalize must be one of none, batch, running, got yes"),
    (["reward=learned", "sft.n_pairs=0"], "needs a reward head, but sft.n_pairs=0 with"),
    (["reward=learned", "sft.reward_weight=0"], "with sft.reward_weight=0 trains none"),
    (
        ["reward.missing_eos_penalty=-1"],
        "reward.missing_eos_penalty must be a number of at least 0, got -1",
    ),
    (
        ["algorithm.resample=1", "reward.normalize=batch"],
        "algorithm.resample=1 compares rewards within groups",
    ),
    (
        ["reward.overlong_buffer=999"],
        "reward.overlong_buffer must be at most rollout.max_new_tokens=24, got 999",
    ),
    (
        ["cache.target_overlap=0.86", "diagnostics.mismatch=null"],
        "cache.target_overlap=0.86 needs an evicting",
    ),
    (
        ["cache.target_overlap=0.86", "cache.policy=dense", "distillation=none"],
        "cache.target_overlap=0.86 needs an evicting",
    ),
    (["cache.budget_bounds=[20,30]"], "budget_bounds must be two budgets, the smaller one first"),
    (["cache.budget_bounds=[2,30]"], "budget must be at least sink + window + 1 = 5, got 2"),
    (
        ["fabric.tokens_per_pass=0"],
        "fabric.tokens_per_pass must be auto or a whole number of at least 1, got 0",
    ),
    (
        ["fabric.tokens_per_pass=many"],
        "fabric.tokens_per_pass must be auto or a whole number of at least 1, got many",
    ),
    (
        ["evaluation.batch_size=0"],
        "evaluation.batch_size must be auto or a whole number of at least 1, got 0",
    ),
    (
        ["rollout.max_rows=7"],
        "rollout.max_rows must be at least algorithm.group_size=8, or null for all, got 7; the responses",
    ),
    (
        ["rollout.max_rows=true"],
        "rollout.max_rows must be a whole number of at least 1 or null, got true",
    ),
    (["rollout.cuda_graph=1"], "rollout.cuda_graph must be true or false or null, got 1"),
    (
        ["rollout.cuda_graph=yes_please"],
        "rollout.cuda_graph must be true or false or null, got yes_please",
    ),
    (["kernels=cuda"], "kernels must be one of auto, reference, triton, got cuda"),
    (["roles.alpha=0"], "roles.alpha must be a whole number of at least 1, got 0"),
    (["algorithm.kl.weight=0.1", "algorithm.kl.target=6", "algorithm.kl.horizon=50"], "steers too fast"),
    (
        [
            "algorithm=online_dpo",
            "algorithm.advantage._target_=lit_rlkv.experience.advantages.GroupAdvantage",
        ],
        "unexpected 'drop_ties'",
    ),
    (["algorithm.loss._target_=lit_rlkv.modules.online_dpo.OnlineDPO"], "unexpected 'clip_low'"),
    (["algorithm=online_dpo", "algorithm.loss.beta=null"], "beta"),
    (["algorithm=online_dpo", "~algorithm.loss.beta"], "algorithm.loss lacks beta; OnlineDPO needs"),
    (
        ["algorithm=ppo", "algorithm.loss.value_clip=none"],
        "value_clip must be a number above 0, got none",
    ),
    (
        ["algorithm=ppo", "algorithm.loss.separate_passes=off"],
        "algorithm.loss.separate_passes must be true or false, got off",
    ),
    (
        ["algorithm=ppo", "algorithm.advantage.whiten_advantages=no"],
        "algorithm.advantage.whiten_advantages must be true or false, got no",
    ),
    (["+user_callbacks.a=null"], "user_callbacks.a must name its class or function in _target_, got null"),
    (["algorithm.loss._partial_=1e39"], "algorithm.loss._partial_ must"),
    (["optimizer._partial_=1"], "optimizer._partial_ must be true or false, got 1"),
    (["stages=[rl,rl]"], "stages=[rl, rl] names a stage twice; name each once"),
    (
        ["roles.gradient_checkpointing=no"],
        "roles.gradient_checkpointing must be true or false or one of auto, host, got no",
    ),
    (
        ["algorithm.max_grad_norm=abc"],
        "algorithm.max_grad_norm must be a number above 0 or null, got abc",
    ),
    (["roles.target_modules=5"], "roles.target_modules must be a text or a list, each a text, got 5"),
    (
        ["algorithm=ppo", "roles.value_init=reward", "sft.n_pairs=0"],
        "roles.value_init=reward starts the critic from the reward head, and the model of the SFT stage has",
    ),
    (
        [
            "task=preferences",
            "task.path=tests/data/preferences.jsonl",
            "reward=learned",
            "sft.on_policy_pairs.n_prompts=8",
        ],
        "sft.on_policy_pairs.n_prompts=8: Preferences cannot verify answers",
    ),
    (
        ["experiment=tools", "sft.on_policy_pairs.n_prompts=8"],
        "sft.on_policy_pairs.n_prompts=8",
    ),
    (["reward.environment=1"], "reward.environment=1"),
    (["environment=tools", "environment.tools=[os.system]"], "'os.system' is not from a trusted package"),
    (["environment=custom", "environment._target_=lit_rlkv.tasks.ChainSum"], "environment._target_"),
    (["environment=custom", "environment._target_=mine.Env"], "trusted_modules=[mine]"),
    (["environment=tools", "+environment.patern=x"], "patern"),
    (["environment=tools", "environment.pattern='('"], "pattern"),
    (["rollout.max_turns=0"], "rollout.max_turns"),
    (
        ["roles.layout=hydro"],
        "roles.layout must be one of ppo, lora_ppo, dynamic_lora, j_hydra, hydra, got hydro",
    ),
    (["roles.value_view=sparse"], "roles.value_view must be one of shadow, dense, got sparse"),
    (["algorithm=ppo", "sft.joint=false"], "roles.layout=hydra has one backbone for policy and critics"),
    (
        ["algorithm.n_minibatches=999"],
        "algorithm.n_minibatches=999 cannot be cut from 256 responses; lower it, or raise rollout.n_pr",
    ),
    *(
        (
            [f"roles={layout}", "algorithm.reference_sync.every=4", "algorithm.kl.weight=0.1"],
            "algorithm.reference_sync.every=4 needs a policy with weights of its own to mix into the "
            f"reference, but roles.layout={layout} trains an adapter",
        )
        for layout in ("hydra", "j_hydra", "dynamic_lora", "lora_ppo")
    ),
    (
        ["roles=full", "experiment=shadow", "algorithm.reference_sync.every=4"],
        "algorithm.reference_sync.every=4, but nothing reads the reference: algorithm.kl.weight=0, and "
        "no distillation",
    ),
    (
        ["roles=full", "algorithm.kl.weight=0.1", "algorithm.reference_sync.every=0"],
        "algorithm.reference_sync.every must be a whole number of at least 1 or null, got 0",
    ),
    (
        ["algorithm.curriculum.decay=0.9"],
        "algorithm.curriculum.decay=0.9 draws problems by their earlier success, and ChainSum(n_terms=5, "
        "max_operand=9, ",
    ),
    (["algorithm.curriculum.decay=1"], "algorithm.curriculum.decay must be a number of at least 0 and below"),
    (["algorithm.curriculum.floor=0"], "algorithm.curriculum.floor must be a number above 0, got 0"),
    (
        ["algorithm.reference_sync.alpha=1.5"],
        "algorithm.reference_sync.alpha must be a number above 0 and at most 1, got 1.5",
    ),
    (["correction=dense"], "distillation needs an evicting or quantized cache"),
    (["cache.policy=dense"], "distillation needs an evicting or quantized cache"),
    (["model.path=./no-such-folder"], "model.path=./no-such-folder is not a checkpoint folder"),
    (["stages=[sft,ppo]"], "stages[1] must be one of sft, rl, eval, got ppo"),
    (["stages=[]"], "leaves nothing to do"),
    (
        ["fabric.precision=fp8"],
        "fabric.precision must be one of 32-true, 64-true, bf16-true, 16-mixed, bf16-mixed, got fp8",
    ),
    (["task._target_=os.system"], "task._target_='os.system' is not from a trusted package"),
    (
        ["task._target_=lit_rlkv.tasks.ChainProduct"],
        "task._target_='lit_rlkv.tasks.ChainProduct' cannot be imported",
    ),
    (
        ["+task.n_term=3"],
        "lit_rlkv.tasks.ChainSum: unexpected 'n_term'; it takes n_terms, max_operand",
    ),
    (["+algorithm.loss.cliphigh=3"], "lit_rlkv.modules.grpo.GRPO: unexpected 'cliphigh'"),
    (["+correction.weight_fn.cap=3"], "lit_rlkv.objectives.corrections.unweighted: unexpected 'cap'"),
    (["reward.accuracy=environment"], "reward.accuracy=environment needs an environment"),
]


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(("overrides", "says"), every_nth(3, MISTAKES))
def test_a_mistake_ends_in_one_clear_error(overrides, says):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=overrides)
    with pytest.raises(ConfigError, match=re.escape(says)):
        checked_config(cfg)


@pytest.mark.parametrize(
    "reads", [["algorithm.kl.weight=0.1"], ["experiment=smd"], ["algorithm=online_dpo"], ["algorithm=ppo"]]
)
def test_a_reference_may_follow_the_policy_wherever_something_reads_it(reads):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        sync = ["roles=full", "algorithm.reference_sync.every=4"]
        cfg = compose("config", overrides=["experiment=shadow", *reads, *sync])
    assert checked_config(cfg).algorithm.reference_sync.alpha == 0.6


def test_a_trained_policy_of_the_users_own_may_learn_without_a_loss_of_the_tokens(tmp_path, monkeypatch):
    text = "from lit_rlkv.kvcache.policies import Learned\n\n\nclass Own(Learned):\n    pass\n"
    (tmp_path / "my_evictions.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    alone = ["experiment=shadow", "cache.policy=my_evictions.Own", "algorithm.policy_weight=0"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)), trusting(["my_evictions"]):
        assert checked_config(compose("config", overrides=alone)).parts.cache.is_trained
        with pytest.raises(ConfigError, match="leaves the policy nothing"):
            checked_config(compose("config", overrides=[*alone, "algorithm.eviction.weight=0"]))


def test_options_of_evictions_may_stand_where_none_are_trained():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        for policy in ("learned", "snapkv"):  # a sweep over policies
            cfg = compose("config", overrides=[f"cache.policy={policy}", "algorithm.eviction.clip=0.3"])
            assert checked_config(cfg).algorithm.eviction.clip == 0.3


PLAIN = "~optimizer.betas ~optimizer.weight_decay"
MUON = f"optimizer._target_=torch.optim.Muon {PLAIN}"
SFT = "~sft.optimizer.betas ~sft.optimizer.weight_decay"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (f"optimizer._target_=torch.optim.LBFGS {PLAIN}", "optimizer._target_=torch.optim.LBFGS must"),
        (f"optimizer._target_=torch.optim.SparseAdam {PLAIN}", "optimizer._target_=torch.optim.SparseAdam"),
        (
            f"stages=[sft] sft.optimizer._target_=torch.optim.Muon {SFT}",
            "sft.optimizer._target_=torch.optim.M",
        ),
        (f"roles=full {MUON}", "Muon must train parameters of 1 and 2 dimensions, .* its first step fails: "),
        (f"algorithm=ppo {MUON}", "of 1 and 2 dimensions"),  # the bias of the value head
        (f"experiment=shadow cache.policy=learned {MUON}", "of 1 and 2 and 3 dimensions"),
        (MUON, None),
        ("roles=full", None),
        (f"stages=[eval] optimizer._target_=torch.optim.LBFGS {PLAIN}", None),
    ],
)
def test_an_optimizer_that_cannot_train_the_run_is_refused_before_any_training(options, says):
    cfg = checked_config(composed(*options.split()))
    if says is None:
        try_optimizers(cfg, torch.device("cpu"))
    else:
        with pytest.raises(ConfigError, match=says) as caught:
            try_optimizers(cfg, torch.device("cpu"))
        assert "\n" not in str(caught.value)
