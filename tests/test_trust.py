"""Trust in the user's modules lasts as long as a block or the process, and covers nothing else."""

import pytest

from lit_rlkv.trust import (
    is_trusted,
    load_trusted,
    load_trusted_class,
    trust_modules,
    trusted_modules,
    trusting,
)


@pytest.fixture(autouse=True)
def _trust_ends_with_the_test():
    with trusting([]):
        yield


@pytest.mark.parametrize("name", ["os", "builtins", "subprocess", "importlib.util", "", 3])
def test_python_itself_cannot_be_trusted(name):
    with pytest.raises(ValueError, match=f"must be your own, got {name!r}"):
        trust_modules([name])
    assert trusted_modules() == ()


def test_trust_covers_a_module_and_what_lies_in_it():
    with trusting(["own", "score.py", "code.py"]):
        assert is_trusted("own.Thing")
        assert is_trusted("own.inner.Thing")
        assert not is_trusted("ownmodule.Thing")
        assert trusted_modules() == ("own", "score.py", "code.py")
    assert not is_trusted("own.Thing")


@pytest.mark.parametrize(
    ("trusted", "target"), [("fractal", "fraction.Fraction"), ("nowhere_at_all", "nowhere_at_all.Thing")]
)
def test_a_class_that_is_not_trusted_or_not_there_is_not_loaded(trusted, target):
    with trusting([trusted]), pytest.raises(ValueError, match=target):
        load_trusted_class(target)


def test_a_function_that_a_trusted_module_only_imports_is_not_loaded():
    with trusting(["tests"]):
        assert load_trusted("tests.models_zoo.build").__name__ == "build"
        with pytest.raises(ValueError, match="defined in tests"):
            load_trusted("tests.models_zoo.prepare_backbone")
