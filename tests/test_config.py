import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from lit_rlkv.config import (
    CONF_DIR,
    ConfigError,
    build,
    build_reward,
    check_command_line,
    check_config,
    check_keys,
)
from lit_rlkv.kvcache import POLICIES

GROUPS = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())
OPTIONS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF_DIR.glob("*/*.yaml")
    if path.stem != "none" and path.stem[0] != "_"
)
# Options that need something of the user's, or of the running program.
EXTRAS = {
    "task=jsonl": ["task.path=tests/data/problems.jsonl"],
    "task=dataset": ["task.dataset=tests/data/problems.jsonl"],
    "task=gsm8k": ["task.dataset=tests/data/gsm8k", "task.name=null"],
    "reward=python": ["reward.functions.custom.path=tests/data/rewards.py:score"],
    "reward=command": ["reward.functions.custom.argv=[sh,score.sh]"],
    "reward=endpoint": ["reward.functions.custom.url=http://localhost:8000/score"],
    "task=preferences": ["task.path=tests/data/preferences.jsonl", "reward=learned"],
    "task=preferences_hf": ["task.dataset=tests/data/preferences.jsonl", "reward=learned"],
    "task=reasoning_gym": ["task.dataset=spell_backward"],
    "logger=lightning_csv": ["logger.save_dir=runs"],
    "correction=dense": ["distillation=none"],
}
PACKAGES = {"task=preferences_hf": "datasets", "task=reasoning_gym": "reasoning_gym"}
PACKAGES |= {"task=gsm8k": "datasets", "reward=math": "math_verify"}
"""Of the extras `data`, `gym` and `math`."""
JUDGED = [
    "algorithm=online_dpo",
    "algorithm.credit.judge={_target_: lit_rlkv.rewards.judges.right_then_short, _partial_: true}",
]
STABLE_NAMES = (
    "task", "model.path", "cache.policy", "cache.budget", "cache.interval", "cache.sink", "cache.window",
    "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p", "algorithm", "algorithm.group_size",
    "correction", "distillation", "distillation.weight", "stages", "seed", "logger", "resume",
)  # fmt: skip


@pytest.fixture
def hydra_conf():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        yield


def checked(*overrides: str):
    full = compose("config", overrides=list(overrides), return_hydra_config=True)
    cfg = compose("config", overrides=list(overrides))
    check_keys(cfg, full.hydra.runtime.choices, overrides)
    check_config(cfg)
    return cfg


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    return str(caught.value)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes_and_passes_the_checks(hydra_conf, option):
    if option in PACKAGES:
        pytest.importorskip(PACKAGES[option])
    checked(option, *EXTRAS.get(option, []))


def test_a_reward_function_may_be_added_and_another_left_out(hydra_conf):
    short = "{_target_: lit_rlkv.rewards.Regex, pattern: '^.{0,200}$', weight: 0.1}"
    cfg = checked("task=word_problems", "reward=numeric", f"+reward.functions.short={short}")
    assert [*cfg.reward.functions] == ["correct", "format", "short"]
    assert build_reward(cfg.reward).functions["short"].pattern == "^.{0,200}$"
    cfg = checked("task=word_problems", "reward=numeric", "~reward.functions.format", "reward.verifier=0.5")
    assert [*build_reward(cfg.reward).functions] == ["correct"]


def test_the_names_of_the_command_line_stay(hydra_conf):
    cfg = compose("config")
    missing = [name for name in STABLE_NAMES if OmegaConf.select(cfg, name, default="absent") == "absent"]
    assert missing == []
    assert {"experiment", "debug"} <= set(GROUPS)


@pytest.mark.parametrize("policy", [*POLICIES])
def test_every_eviction_policy_is_an_option(hydra_conf, policy):
    assert checked(f"cache.policy={policy}").cache.policy == policy


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["distillation.teacher=critic"], "distillation teacher 'critic' is unknown"),
        (["distillation.weight=0", "distillation.anchor_weight=0"], "anchor_weight=0 has no effect"),
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
        (["task._target_=lit_rlkv.checkpoint.torch.load"], "is no class or function that a config may"),
        (["task._target_=lit_rlkv.config.building.Path"], "is no class or function that a config may"),
        (
            ["task._target_=lit_rlkv.rewards.isolated.worker.load"],
            "is no class or function that a config may",
        ),
        (["task._target_=lit_rlkv.files.write_atomically"], "is no class or function that a config may"),
        (["cache.budget=4"], "sink=1 + window=3 leave no slot to choose in budget=4"),
        (["cache.budget=12.5"], "not an integer"),
        (["cache.policy=lru"], "unknown cache policy 'lru'; choose one of dense, streaming"),
        (["evaluation.budgets=[2]"], "leave no slot to choose in budget=2"),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9 cannot be replayed"),
        (["rollout.top_k=20"], "rollout.top_k=20 cannot be replayed"),
        (["rollout.temperature=0"], "rollout.temperature=0"),
        (["rollout.max_new_tokens=0"], "rollout.max_new_tokens=0 is not a count"),
        (["algorithm.group_size=1"], "algorithm.group_size=1: GroupCredit compares"),
        (["algorithm.credit.estimator=gae"], "estimator='gae' is unknown; choose one of grpo"),
        (["algorithm.kl.estimator=k1"], "estimator='k1' does not serve in the loss"),
        (["algorithm.kl.target=6"], "target=6 steers weight=0.0"),
        (["algorithm=online_dpo", "algorithm.n_minibatches=33"], "cannot be cut from 32 pairs"),
        (["algorithm=online_dpo", "algorithm.loss.kind=hinge"], "kind='hinge'"),
        (["algorithm=online_dpo", "algorithm.kl.place=reward"], "has no meaning for preference pairs"),
        (["algorithm=ppo", "+algorithm.loss.cliprange=1"], "PPO: unexpected 'cliprange'"),
        (["algorithm=ppo", "algorithm.credit.lam=1.5"], "lam=1.5 is no discount"),
        (["algorithm.loss.clip_low=0"], "clip_low=0 leaves nothing to learn from"),
        (["reward.verifier=0"], "verifier=0 and learned=0 leave no reward"),
        (["reward.accuracy=correct"], "accuracy='correct' is not among the functions (none)"),
        (["reward.max_failed=2"], "max_failed=2 is no share"),
        (["+reward.functions.a={weight: 1}"], "reward.functions.a={'weight': 1} names no function"),
        (
            ["+reward.functions.a={_target_: lit_rlkv.data.tasks.ChainSum}"],
            "reward.functions.a: lit_rlkv.data.tasks.ChainSum is no reward function",
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
            ["algorithm=online_dpo", "algorithm.credit._target_=lit_rlkv.data.credit.GroupCredit"],
            "unexpected 'judge'",
        ),
        (["algorithm.loss._target_=lit_rlkv.modules.online_dpo.OnlineDPO"], "unexpected 'clip_low'"),
        (["algorithm=online_dpo", "algorithm.loss.beta=null"], "beta"),
        (["algorithm=online_dpo", "~algorithm.loss.beta"], "algorithm.loss lacks beta; OnlineDPO needs"),
        (["algorithm=ppo", "algorithm.loss.value_clip=none"], "value_clip=none leaves nothing to learn from"),
        (["algorithm=ppo", "algorithm.loss.separate_passes=off"], "separate_passes=off is neither true nor"),
        (["algorithm=ppo", "algorithm.credit.whitens=no"], "whitens=no is neither true nor false"),
        (["roles.gradient_checkpointing=no"], "roles.gradient_checkpointing=no is neither true nor false"),
        (["algorithm.max_grad_norm=abc"], "algorithm.max_grad_norm=abc is not a number"),
        (["algorithm=online_dpo", "algorithm.credit.judge=right_then_short"], "is no function; give it as"),
        (
            [*JUDGED, "task=preferences", "task.path=tests/data/preferences.jsonl", "reward=learned"],
            "the judge asks a verifier, and Preferences has none",
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
                "sft.mistakes.n_prompts=8",
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
        (["task._target_=lit_rlkv.data.tasks.ChainProduct"], "cannot be imported"),
        (
            ["+task.n_term=3"],
            "lit_rlkv.data.tasks.ChainSum: unexpected 'n_term'; it takes n_terms, max_operand",
        ),
        (["+algorithm.loss.cliphigh=3"], "lit_rlkv.modules.grpo.GRPO: unexpected 'cliphigh'"),
        (["+correction.weigh.cap=3"], "lit_rlkv.objectives.corrections.unweighted: unexpected 'cap'"),
    ],
)
def test_a_mistake_ends_in_one_clear_error(hydra_conf, overrides, says):
    cfg = compose("config", overrides=overrides)
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_config(cfg)


def test_a_misspelt_key_on_the_command_line_is_refused(hydra_conf):
    with pytest.raises(ConfigCompositionException, match=r"cache\.bugdet"):
        compose("config", overrides=["cache.bugdet=8"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("cache:\n  bugdet: 8\n", "unknown key 'cache.bugdet'"),
        ("cache:\n  bugdet: 8\n", "did you mean 'cache.budget'?"),
        ("algoritm:\n  group_size: 4\n", "unknown key 'algoritm.group_size'"),
    ],
)
def test_a_misspelt_key_in_an_experiment_file_is_refused(tmp_path, body, says):
    for path in CONF_DIR.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(CONF_DIR)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n" + body)
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        assert says in refusal("experiment=mine")
        checked("experiment=smd")


def test_what_the_options_of_a_group_share_is_no_option(hydra_conf):
    assert "roles=_shared is what the options of roles share" in refusal("roles=_shared")


def test_the_default_passes_every_check(hydra_conf):
    cfg = checked()
    assert cfg.correction.replays
    assert cfg.distillation.direction == "sparse_student"


def test_distillation_can_be_left_out_or_turned_around_alone(hydra_conf):
    assert checked("distillation=none").distillation is None
    dense_student = checked("distillation=dense_student").distillation
    assert (dense_student.direction, dense_student.weight, dense_student.anchor_weight) == (
        "dense_student",
        0.1,
        0.0,
    )


def test_what_the_command_line_adds_is_judged_by_the_signature_that_takes_it(hydra_conf):
    assert checked("+optimizer.eps=1e-6").optimizer.eps == 1e-6
    assert "unexpected 'epsilon'" in refusal("+optimizer.epsilon=1e-6")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["diagnostics=null"], "diagnostics=null is no option; choose one of default, none"),
        (["logger=null"], "logger=null is no option; choose one of csv,"),
        (["diagnostics=nnone"], "diagnostics=nnone is no option; choose one of default, none"),
        (["diagnostics.gradent=null"], "unknown key 'diagnostics.gradent': did you mean 'diagnostics.gradi"),
        (["diagnostic=none"], "unknown key 'diagnostic': did you mean 'diagnostics'?"),
        (["logger.projct=x"], "unknown key 'logger.projct': did you mean 'logger.project' of logger=wandb?"),
        (["logger.project=x"], "unknown key 'logger.project': logger=wandb has it"),
        (["logger=wandb", "logger.projct=x"], "unknown key 'logger.projct': did you mean 'logger.project'?"),
        (["zzz=1"], "unknown key 'zzz': python -m lit_rlkv.fit --cfg job shows all"),
        (["seed=1,2"], "Ambiguous value for argument 'seed=1,2' 1. To use it as a list"),
    ],
)
def test_what_hydra_says_against_a_command_line_is_one_line(overrides, says):
    with pytest.raises(ConfigError) as caught:
        check_command_line("config", overrides)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    check_command_line("config", ["logger=wandb", "logger.project=x", "diagnostics.gradient=null"])


def test_what_is_added_where_nothing_judges_it_is_refused(hydra_conf):
    says = "unknown key 'diagnostics.gradent' on the command line: did you mean 'diagnostics.gradient'?"
    assert refusal("+diagnostics.gradent=null") == says
    assert refusal("+sft.n_step=3").startswith("unknown key 'sft.n_step' on the command line")
    assert "unexpected keyword argument 'budgett'" in refusal("+cache.budgett=3")


def test_a_diagnostic_is_left_out_by_null_and_by_nothing_else(hydra_conf):
    assert checked("diagnostics.gradient=null").diagnostics.gradient is None
    says = "diagnostics.gradient=False takes the place of blocks, every, n_parts"
    assert refusal("diagnostics.gradient=false").startswith(says)
    assert refusal("diagnostics.gradient=false").endswith("set these one by one; null leaves it out")


def test_build_makes_what_the_config_names(hydra_conf):
    cfg = compose("config", overrides=["task.n_terms=7"])
    assert build(cfg.task).n_terms == 7


def test_experiments_name_their_own_command():
    for path in (Path(CONF_DIR) / "experiment").glob("*.yaml"):
        assert f"python -m lit_rlkv.fit experiment={path.stem}" in path.read_text()
