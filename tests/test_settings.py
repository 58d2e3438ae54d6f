"""Dataclasses whose values pydantic checks: kinds of values, and one sentence for each mistake."""

import math
import pickle
from dataclasses import asdict, replace
from typing import Annotated, Literal

import pytest

from lit_rlkv import CacheSpec
from lit_rlkv.checks import Number, Range
from lit_rlkv.config import ConfigError
from lit_rlkv.config.options import convert
from lit_rlkv.settings import Bool, PositiveInt, Sampling, Text, dataclass, keys_of


@dataclass(frozen=True)
class Inner:
    """A group."""

    size: PositiveInt = 2
    """slots
    in all"""
    share: Annotated[Number, Range(above=0, below=1)] | None = None
    """of the slots"""

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError("size must not be 13, got 13; give another")


@dataclass(frozen=True, kw_only=True)
class Outer(Inner):
    """A whole."""

    size: PositiveInt = 3
    name: Text
    """of it"""
    sizes: Literal["all"] | tuple[PositiveInt, ...] = "all"
    """several"""
    is_on: Bool = False
    """a switch"""
    inner: Inner = Inner()


def test_the_right_values_stay_as_they_are_and_lists_become_tuples():
    made = convert(Outer, {"name": "a", "share": 0.5, "sizes": [1, 2], "inner": {"size": 7}})
    assert made == Outer(name="a", share=0.5, sizes=(1, 2), inner=Inner(7))
    assert isinstance(convert(Outer, {"name": "a", "size": 4}).size, int)
    assert type(Sampling(temperature=1).temperature) is int, "a saved config is compared by its text"
    assert pickle.loads(pickle.dumps(made)) == made
    assert asdict(replace(made, size=5))["inner"] == {"size": 7, "share": None}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"size": 0}, "x.size must be a whole number of at least 1, got 0 (slots in all)"),
        ({"size": True}, "x.size must be a whole number of at least 1, got true (slots in all)"),
        ({"size": 10**10}, "x.size must be a whole number of at least 1 and of at most 2147483647 in"),
        ({"size": "3"}, "x.size must be a whole number of at least 1, got 3"),
        ({"share": math.nan}, "x.share must be a number above 0 and below 1 or null, got nan (of the slots)"),
        ({"share": 10**400}, "x.share must be a number above 0 and below 1 or null, got 1000"),
        ({"is_on": 1}, "x.is_on must be true or false, got 1 (a switch)"),
        ({"is_on": "yes"}, "x.is_on must be true or false, got yes"),
        ({"name": ""}, "x.name must be a text, got '' (of it)"),
        ({"sizes": [1, 0]}, "x.sizes[1] must be a whole number of at least 1, got 0 (several)"),
        ({"sizes": 5}, "x.sizes must be all or a list, each a whole number of at least 1, got 5 (several); "
         "write x.sizes=[5]"),
        ({"inner": 3}, "x.inner must have the keys size, share, got 3"),
        ({"inner": {"size": -1}}, "x.inner.size must be a whole number of at least 1, got -1 (slots in all)"),
        ({"inner": {"size": 13}}, "x.inner: size must not be 13, got 13; give another"),
        ({"inner": {"sise": 1}, "size": 0}, "unknown key 'x.inner.sise'; x.inner takes size, share; did "
         "you mean size?"),
        ({"zzz": 1}, "unknown key 'x.zzz'; x takes size, share, name, sizes, is_on, inner"),
    ],
)  # fmt: skip
def test_the_first_mistake_is_one_sentence(values, says):
    with pytest.raises(ConfigError) as caught:
        convert(Outer, {"name": "a"} | values, "x")
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_setting_that_must_be_given_is_asked_for():
    with pytest.raises(ConfigError, match=r"^name is missing; give it \(of it\)$"):
        convert(Outer, {})


def test_python_gets_the_same_sentences_by_place_or_by_name():
    for make in (
        lambda: Sampling(-1),
        lambda: Sampling(temperature=-1),
        lambda: replace(Sampling(), temperature=-1),
    ):
        with pytest.raises(
            ValueError, match=r"^temperature must be a number of at least 0 .*, got -1 \(divides"
        ):
            make()
    with pytest.raises(ValueError, match="Sampling takes 4 arguments without a name"):
        Sampling(1.0, 1, 1.0, 0.5, 3)
    with pytest.raises(ValueError, match=r"unknown key 'bugdet'; it takes policy, .*; did you mean budget"):
        CacheSpec(bugdet=3)


def test_a_meaning_is_inherited_with_the_setting():
    assert keys_of(Outer)["size"].description == "slots in all"
    assert keys_of(CacheSpec)["budget"].description == "keys that survive a compaction"


def test_equal_caches_are_one_key():
    assert len({CacheSpec(), CacheSpec("snapkv", policy_options={}), CacheSpec(budget=64)}) == 2
