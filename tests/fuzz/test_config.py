"""Random command lines of fit: each is checked and its objects are built, or it is refused in one line."""

from typing import Any

import pytest
from hydra import compose
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lit_rlkv.cli import exit_in_one_line
from lit_rlkv.config.composing import groups, initialized, options_of, quoted
from lit_rlkv.config.keys import keys_of_options
from lit_rlkv.config.options import leaves
from lit_rlkv.config.schema import Config
from lit_rlkv.settings import leaf_keys
from tests.config.asking import asked
from tests.fuzz.harness import cases, outcome_of, run_cases

pytestmark = pytest.mark.usefixtures("_as_users_run_it")

LARGEST = 3.5e38
"""Largest number of float32, about."""
with initialized():
    KEYS = sorted(
        {key for key, _ in leaves(OmegaConf.to_container(compose("config")))}
        | {key for key, _ in leaf_keys(Config)}
    )
    KEYS_OF_OPTIONS = sorted(keys_of_options())
GROUPS = {group: options_of(group) for group in groups()}

ODD = [
    "null", "true", "false", "''", "[]", "{}", "[1,2]", "[[1],[x]]", "{a:1}", "{a:{b:[]}}", "auto", "none",
    "x", "1,2", "${seed}", "${nope}", "${rollout}", "${oc.env:HOME}", "${oc.env:NOPE_NOPE}", "${",
    "${eval:1}", "${oc.decode:'[1'}", "???", "1e", "0x10", "1_000",
    "é日本", "\u202e", "\x00", "\ud800", "=", ":", "{", "]",
    "'", '"', "\\", "~", "../..", "os.getpid", "lit_rlkv.tasks.JsonlTask", "builtins.dict",
    "torch.optim.SGD", "x y", "x" * 2000, "[" * 300, "[" + "1," * 300 + "1]",
]  # fmt: skip
NUMBERS = [
    "0", "1", "2", "3", "7", "-1", "0.5", "-0.5", "1.0", "2.5", "1e-300", "5e-324", "-0.0", "100", "1e6",
    "nan", "inf", "-inf", ".inf", "1e999", "1e39",
    "1" + "0" * 400,
]  # fmt: skip
numbers = st.sampled_from(NUMBERS) | st.integers(-10, 2000).map(str) | st.floats(-1e6, 1e6).map(repr)
values = numbers | st.sampled_from(ODD) | st.text(max_size=6) | st.text(max_size=6).map(quoted)
keys = st.sampled_from(KEYS) | st.sampled_from(KEYS) | st.sampled_from(KEYS_OF_OPTIONS)
signs = st.sampled_from([""] * 8 + ["+", "++"])
assignments = st.builds("{}{}={}".format, signs, keys, values)
good_choices = st.sampled_from([f"{group}={name}" for group, names in GROUPS.items() for name in names])
bad_choices = st.builds(
    "{}={}".format, st.sampled_from(sorted(GROUPS)), st.sampled_from(["nope", "null", "", "1"])
)
others = keys.map("~{}".format) | keys.map("{}.nope=1".format) | st.text(max_size=8) | bad_choices
command_lines = st.builds(
    lambda *parts: [argument for part in parts for argument in part],
    st.lists(good_choices, max_size=1),
    st.lists(assignments, min_size=1, max_size=2),
    st.sampled_from([0] * 7 + [1]).flatmap(lambda n: st.lists(others, min_size=n, max_size=n)),
)


def numbers_of(node: Any, key: str = "") -> list[tuple[str, float]]:
    """Return every number in a config with its key, those in lists too."""
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return [found for name, value in items for found in numbers_of(value, f"{key}.{name}")]
    return [(key, node)] if isinstance(node, int | float) else []


def accepted(overrides: list[str]) -> list[tuple[str, float]]:
    """Check a command line as fit does, and return the numbers of its config."""
    with exit_in_one_line():
        return numbers_of(OmegaConf.to_container(asked(*overrides).source))


def check(overrides: list[str]) -> None:
    found = outcome_of(lambda: accepted(overrides), memory=4 << 30)
    found.check_one_line("SystemExit")
    not_finite = [(key, n) for key, n in found.value or [] if not abs(n) <= LARGEST]
    assert not_finite == []


@cases(6, 100)
def test_random_command_lines_are_accepted_or_refused_in_one_line(n_cases):
    run_cases(n_cases, check, overrides=command_lines)
