import re

import pytest
from hydra import compose, initialize_config_dir

from lit_rlkv.config import CONF_DIR, ConfigError
from lit_rlkv.config.rules import check_config

JUDGED = [
    "algorithm=online_dpo",
    "algorithm.advantage.judge={_target_: lit_rlkv.rewards.judges.right_then_short, _partial_: true}",
]


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["distillation.teacher=critic"], "distillation.teacher='critic' is unknown"),
        (["distillation.weight=0", "distillation.anchor_weight=0"], "one above 0, got 0 and 0"),
        (
            ["experiment=shadow", "algorithm.policy_weight=0"],
            "algorithm.policy_weight=0 leaves the policy nothing",
        ),
        (["callbacks.samples_every=0"], "callbacks.samples_every=0 is not a count"),
        (["algorithm.group_size=2.5"], "algorithm.group_size=2.5 is not a count"),
        (["optimizer.lr=abc"], "optimizer.lr=abc is not a number"),
        (["sft.n_pairs=999"], "sft.n_pairs=999 is more than sft.batch_size=128"),
        (["sft.n_steps=70"], "sft.n_steps=70 is no multiple of sft.steps_per_iteration=50"),
        (["task.n_terms=1"], "n_terms=1 leaves nothing to add"),
        (["task=jsonl", "task.path=nowhere.jsonl"], "there is no file at 'nowhere.jsonl'"),
        (["stages=rl"], "stages=rl is not a list; write stages=[rl]"),
        (["fabric.devices=0"], "fabric.devices=0 is no number of processes"),
        (["fabric.num_nodes=two"], "fabric.num_nodes=two is no number of machines"),
        (["fabric.strategy=dp"], "fabric.strategy='dp' is unknown; choose one of auto, ddp"),
        (["rollout.n_shards=0"], "rollout.n_shards=0 is no number of shards"),
        (["callbacks.keep_last=0"], "callbacks.keep_last=0 is not a count"),
        (
            ["callbacks.best_mode=most", "callbacks.keep_best=1"],
            "best_mode='most' is unknown; choose max or min",
        ),
        (["algorithm.lr_schedule=cosine"], "algorithm.lr_schedule='cosine' is unknown"),
        (["model.path='~/no-such-folder'"], "model.path=~/no-such-folder is not a checkpoint folder"),
        (["task._target_=lit_rlkv.runs.checkpoint.torch.load"], "is no class or function that a config may"),
        (["task._target_=lit_rlkv.config.building.Path"], "is no class or function that a config may"),
        (
            ["task._target_=lit_rlkv.rewards.isolated.worker.load"],
            "is no class or function that a config may",
        ),
        (["task._target_=lit_rlkv.files.write_atomically"], "is no class or function that a config may"),
        (["cache.budget=4"], "sink + window + 1 = 5, got 4; raise the budget"),
        (["cache.budget=12.5"], "must be an integer, got 12.5"),
        (["cache.policy=lru"], "unknown cache policy 'lru'; choose one of dense, streaming"),
        (["evaluation.budgets=[2]"], "got 2; raise the budget"),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9 cannot be replayed"),
        (["rollout.top_k=20"], "rollout.top_k=20 cannot be replayed"),
        (["rollout.temperature=0"], "rollout.temperature=0"),
        (["rollout.max_new_tokens=0"], "rollout.max_new_tokens=0 is not a count"),
        (["algorithm.group_size=1"], "algorithm.group_size=1: GroupAdvantage compares"),
        (["algorithm.advantage.estimator=gae"], "estimator='gae' is unknown; choose one of grpo"),
        (["algorithm.kl.estimator=k1"], "estimator='k1' does not serve in the loss"),
        (["algorithm.kl.target=6"], "target=6 steers weight=0.0"),
        (["algorithm=online_dpo", "algorithm.n_minibatches=33"], "cannot be cut from 32 pairs"),
        (["algorithm=online_dpo", "algorithm.loss.kind=hinge"], "kind='hinge'"),
        (["algorithm=online_dpo", "algorithm.kl.place=reward"], "has no meaning for preference pairs"),
        (["algorithm=ppo", "+algorithm.loss.cliprange=1"], "PPO: unexpected 'cliprange'"),
        (["algorithm=ppo", "algorithm.advantage.lam=1.5"], "lam=1.5 is no discount"),
        (["algorithm.loss.clip_low=0"], "clip_low must be a number above 0, got 0"),
        (["reward.verifier=0"], "verifier=0 and learned=0 leave no reward"),
        (["reward.accuracy=correct"], "accuracy='correct' is not among the functions (none)"),
        (["reward.max_failed=2"], "max_failed=2 is no share"),
        (["+reward.functions.a={weight: 1}"], "reward.functions.a={'weight': 1} names no function"),
        (
            ["+reward.functions.a={_target_: lit_rlkv.tasks.ChainSum}"],
            "reward.functions.a: lit_rlkv.tasks.ChainSum is no reward function",
        ),
        (
            ["+reward.functions.a={_target_: lit_rlkv.rewards.Regex, pattern: '('}"],
            "reward.functions.a: lit_rlkv.rewards.Regex: pattern='(' is no regular expression",
        ),
        (["+reward.functions.a={_target_: os.system}"], "is not from a trusted package"),
        (["reward=python", "reward.functions.custom.path=a.py"], "path='a.py' names no function"),
        (["reward=command", "reward.functions.custom.argv=sh"], "argv='sh' is no list of a program"),
        (["reward=endpoint", "reward.functions.custom.url=file:///etc/passwd"], "is no address of a service"),
        (
            ["task=dataset", "task.dataset=tests/data/problems.jsonl", "task.prompt_column=question"],
            "no column 'question', it has prompt, answer; set prompt_column",
        ),
        (
            ["task=dataset", "task.dataset=tests/data/problems.jsonl", "task.answer_column=null"],
            "reward.verifier=1.0: Problems does not say what is exactly right",
        ),
        (["reward.normalize=yes"], "normalize='yes' is unknown"),
        (["reward=learned", "sft.n_pairs=0"], "needs a reward head, but sft.n_pairs=0 with"),
        (["reward=learned", "sft.reward_weight=0"], "with sft.reward_weight=0 trains none"),
        (["reward.missing_eos_penalty=-1"], "reward.missing_eos_penalty=-1 is not a number of at least 0"),
        (["rollout.rows_per_pass=0"], "rollout.rows_per_pass=0 scores nothing"),
        (["rollout.max_rows=7"], "rollout.max_rows=7 is no number of rows for the 8 responses to one prompt"),
        (["rollout.max_rows=true"], "rollout.max_rows=True is no number of rows"),
        (["rollout.cuda_graph=1"], "rollout.cuda_graph=1 is none of true, false and null"),
        (["rollout.cuda_graph=yes_please"], "rollout.cuda_graph=yes_please is none of true, false and null"),
        (["kernels=cuda"], "kernels='cuda' is unknown; choose one of auto, reference, triton"),
        (["roles.alpha=0"], "roles.alpha=0 is not a count"),
        (["algorithm.kl.weight=0.1", "algorithm.kl.target=6", "algorithm.kl.horizon=50"], "steers too fast"),
        (
            [
                "algorithm=online_dpo",
                "algorithm.advantage._target_=lit_rlkv.experience.advantages.GroupAdvantage",
            ],
            "unexpected 'judge'",
        ),
        (["algorithm.loss._target_=lit_rlkv.modules.online_dpo.OnlineDPO"], "unexpected 'clip_low'"),
        (["algorithm=online_dpo", "algorithm.loss.beta=null"], "beta"),
        (["algorithm=online_dpo", "~algorithm.loss.beta"], "algorithm.loss lacks beta; OnlineDPO needs"),
        (
            ["algorithm=ppo", "algorithm.loss.value_clip=none"],
            "value_clip must be a number above 0, got none",
        ),
        (["algorithm=ppo", "algorithm.loss.separate_passes=off"], "separate_passes=off is neither true nor"),
        (
            ["algorithm=ppo", "algorithm.advantage.whiten_advantages=no"],
            "whiten_advantages=no is neither true nor false",
        ),
        (["roles.gradient_checkpointing=no"], "roles.gradient_checkpointing=no is neither true nor false"),
        (["algorithm.max_grad_norm=abc"], "algorithm.max_grad_norm=abc is not a number"),
        (
            ["algorithm=online_dpo", "algorithm.advantage.judge=right_then_short"],
            "; give it as _target_ with _partial_: true",
        ),
        (
            [*JUDGED, "task=preferences", "task.path=tests/data/preferences.jsonl", "reward=learned"],
            "the judge needs a verifier, and Preferences has none",
        ),
        ([*JUDGED, "reward.missing_eos_penalty=1"], "has no effect beside a judge"),
        (["roles.target_modules=5"], "roles.target_modules=5 names no modules"),
        (
            ["algorithm=ppo", "roles.value_init=reward", "sft.n_pairs=0"],
            "roles.value_init=reward starts the critic from the reward head, but sft trains none",
        ),
        (
            [
                "task=preferences",
                "task.path=tests/data/preferences.jsonl",
                "reward=learned",
                "sft.on_policy_pairs.n_prompts=8",
            ],
            "the task does not say which answers",
        ),
        (["roles.layout=hydro"], "roles.layout='hydro' is unknown; choose one of ppo, lora_ppo"),
        (["roles.value_view=sparse"], "roles.value_view='sparse' is unknown"),
        (["algorithm=ppo", "sft.joint=false"], "roles.layout=hydra has one backbone for policy and critics"),
        (["algorithm.n_minibatches=9999"], "cannot be cut from"),
        (["correction=dense"], "distillation needs an evicting cache"),
        (["cache.policy=dense"], "distillation needs an evicting cache"),
        (["model.path=./no-such-folder"], "model.path=./no-such-folder is not a checkpoint folder"),
        (["stages=[sft,ppo]"], "unknown ppo; choose from sft, rl, eval"),
        (["stages=[]"], "leaves nothing to do"),
        (["fabric.precision=fp8"], "fabric.precision='fp8' is unknown"),
        (["task._target_=os.system"], "task._target_='os.system' is not from a trusted package"),
        (["task._target_=lit_rlkv.tasks.ChainProduct"], "cannot be imported"),
        (
            ["+task.n_term=3"],
            "lit_rlkv.tasks.ChainSum: unexpected 'n_term'; it takes n_terms, max_operand",
        ),
        (["+algorithm.loss.cliphigh=3"], "lit_rlkv.modules.grpo.GRPO: unexpected 'cliphigh'"),
        (["+correction.weigh.cap=3"], "lit_rlkv.objectives.corrections.unweighted: unexpected 'cap'"),
    ],
)
def test_a_mistake_ends_in_one_clear_error(overrides, says):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=overrides)
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_config(cfg)
