"""Code of the user's own modules runs only if this command line trusts them."""

import re
import sys

import pytest
from omegaconf import OmegaConf

from lit_rlkv.cli import compose_arguments
from lit_rlkv.config import ConfigError, build, check_saved_code, check_targets, grant_trust
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policy import Policy
from lit_rlkv.trust import trusted_modules, trusting

MODULE = """
import os
from shutil import rmtree

import torch
from lit_rlkv.kvcache.policy import Policy

class Thing:
    def __init__(self, size: int = 1):
        self.size = size

class Newest(Policy):
    def score(self, view):
        return view.columns.float()

made = Thing()
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A package `ownmodule` on the path; trust ends with the test."""
    (tmp_path / "ownmodule.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with trusting([]):
        yield
    sys.modules.pop("ownmodule", None)


def node(target, **options):
    return OmegaConf.create({"_target_": target, **options})


def test_a_class_of_a_trusted_module_is_built():
    with trusting(["ownmodule"]):
        assert build(node("ownmodule.Thing", size=3)).size == 3
    with pytest.raises(ConfigError, match="not from a trusted package"):
        build(node("ownmodule.Thing"))


def test_all_untrusted_modules_are_named_with_the_key_to_add_and_none_is_imported():
    cfg = OmegaConf.create({"task": node("ownmodule.Thing"), "logger": node("other.Log")})
    cfg.cache = {"policy": "third.policies.Newest"}
    with pytest.raises(ConfigError, match=re.escape("add trusted_modules=[other,ownmodule,third]")) as caught:
        check_targets(cfg)
    assert "\n" not in str(caught.value)
    assert "ownmodule" not in sys.modules


@pytest.mark.parametrize(
    "target", ["ownmodule.os.system", "ownmodule.rmtree", "ownmodule.torch.load", "ownmodule.made"]
)
def test_imports_of_a_trusted_module_stay_refused(target):
    with trusting(["ownmodule"]), pytest.raises(ConfigError, match="ownmodule"):
        build(node(target))


@pytest.mark.parametrize("program", ["config", "evaluate", "export"])
def test_every_program_has_the_key_and_does_not_keep_it(program):
    cfg, _ = compose_arguments(program, ["trusted_modules=[ownmodule]"])
    assert trusted_modules() == ("ownmodule",)
    assert "trusted_modules" not in cfg


def test_the_key_in_a_config_file_grants_nothing():
    with pytest.raises(ConfigError, match="give it on the command line"):
        grant_trust(OmegaConf.create({"trusted_modules": ["ownmodule"]}), ["seed=1"])
    assert trusted_modules() == ()


def test_a_value_that_is_not_a_list_is_refused():
    with pytest.raises(ConfigError, match=re.escape("write trusted_modules=[ownmodule]")):
        compose_arguments("config", ["trusted_modules=ownmodule"])


def test_a_cache_takes_a_trusted_name_a_class_or_an_instance():
    with pytest.raises(ValueError, match=re.escape("add trusted_modules=[ownmodule]")):
        CacheSpec(policy="ownmodule.Newest")
    with trusting(["ownmodule"]):
        spec = CacheSpec(policy="ownmodule.Newest", budget=30)
        assert spec.label == "Newest 30+128"
        policy = spec.make_policy()
        assert isinstance(policy, Policy)
        with pytest.raises(ValueError, match="must be a subclass of"):
            CacheSpec(policy="ownmodule.Thing")
        with pytest.raises(ValueError, match="must be a class defined in"):
            CacheSpec(policy="ownmodule.os")
    assert type(CacheSpec(policy=type(policy)).make_policy()) is type(policy)
    assert CacheSpec(policy=policy).make_policy() is policy
    with pytest.raises(ValueError, match="have no effect"):
        CacheSpec(policy=policy, policy_options={"n": 1})


FUNCTIONS = {
    "mine": {"_target_": "lit_rlkv.rewards.PythonFunction", "path": "a/rewards.py:score"},
    "own": {"_target_": "lit_rlkv.rewards.PythonFunction", "path": "b/rewards.py:score"},
    "number": {"_target_": "lit_rlkv.rewards.Numeric"},
}
SERVICE = {"_target_": "lit_rlkv.rewards.Endpoint", "url": "http://there/score", "token_env": "HF_TOKEN"}


def test_files_of_a_saved_run_must_be_named_letter_for_letter():
    key = """add "trusted_modules=['a/rewards.py','b/rewards.py']" to the command line"""
    with pytest.raises(ConfigError, match=re.escape(key)):
        check_saved_code(FUNCTIONS)
    check_saved_code({"number": FUNCTIONS["number"]})
    with trusting(["a/rewards.py", "b/rewards.py"]):
        check_saved_code(FUNCTIONS)
        with pytest.raises(ConfigError, match=r"reward\.functions\.own uses 'c/rewards\.py'"):
            check_saved_code({"own": FUNCTIONS["own"] | {"path": "c/rewards.py:score"}})
        with pytest.raises(ConfigError, match="not from a trusted package"):
            build(node("a.rewards.Thing"))


def test_a_saved_run_asks_no_service_that_is_not_named():
    says = r"uses 'http://there/score', which a saved config cannot allow .* add \"trusted_modules=\['http:"
    with pytest.raises(ConfigError, match=says):
        check_saved_code({"judge": SERVICE})
    with trusting(["http://there/score"]):
        check_saved_code({"judge": SERVICE})


def test_a_config_runs_no_program_by_way_of_a_method(tmp_path):
    mark, file = tmp_path / "ran", tmp_path / "score.py"
    file.write_text(f"open({str(mark)!r}, 'w')")
    user_code = "lit_rlkv.rewards.graders.GraderPool"
    pool = {"_target_": user_code, "path": str(file), "function": "score", "options": {}, "timeout_s": 10.0}
    ask = {"_target_": f"{user_code}.ask", "_partial_": True, "question": "x"}
    parse = {"_target_": "lit_rlkv.tasks.rows.parse_rows", "rows": [["a", pool]], "parse": ask}
    for bad in (parse, ask, pool):
        with pytest.raises(ConfigError, match="_target_"):
            build(OmegaConf.create(bad))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("task", "lit_rlkv.tasks.rows.parse_rows"),  # calls what it is given
        ("task", "lit_rlkv.files.write_atomically"),
        ("task", "lit_rlkv.rewards.PythonFunction"),
        ("task", "lightning.pytorch.loggers.CSVLogger"),
        ("reward", "lit_rlkv.rewards.functions.endpoint._Post"),
        ("reward", "lit_rlkv.rewards.isolated.worker.load"),
        ("reward", "lit_rlkv.rewards.RewardManager.ask"),
        ("diagnostics", "lit_rlkv.callbacks.hooks.bound_hooks"),
        ("optimizer", "torch.optim.swa_utils.update_bn"),
        ("optimizer", "torch.optim.AdamW.step"),
        ("logger", "lightning.pytorch.loggers.csv_logs.ExperimentWriter"),
        ("logger", "lightning.pytorch.loggers.csv_logs.os.remove"),
    ],
)
def test_other_groups_private_classes_methods_and_helpers_cannot_be_named(group, target):
    with pytest.raises(ConfigError, match="_target_"):
        check_targets({group: {"_target_": target}})
    with pytest.raises(ConfigError, match="unexpected 'nope'"):  # the control: a class of the group
        check_targets({"task": {"_target_": "lit_rlkv.tasks.ChainSum", "nope": 1}})


@pytest.mark.parametrize("key", ["_args_", "_recursive_", "_convert_"])
def test_a_node_takes_named_arguments_alone(key):
    node = {"_target_": "lit_rlkv.tasks.ChainSum", "n_terms": 3}
    check_targets(OmegaConf.create({"task": node}))
    with pytest.raises(ConfigError, match=rf"task\.{key} must be arguments by name"):
        check_targets(OmegaConf.create({"task": node | {key: [3, 9]}}))
