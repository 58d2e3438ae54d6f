"""The public names of the package are importable from the top, cheaply."""

import importlib
import subprocess
import sys
from importlib.metadata import version

import pytest

import lit_rlkv


@pytest.mark.parametrize("name", lit_rlkv._HOMES)
def test_a_public_name_is_that_of_its_room(name):
    assert getattr(lit_rlkv, name) is getattr(importlib.import_module(lit_rlkv._HOMES[name]), name)


def test_all_lists_every_public_name():
    assert {*lit_rlkv.__all__} == {*lit_rlkv._HOMES, "__version__"}
    assert {*lit_rlkv.__all__} <= {*dir(lit_rlkv)}
    assert lit_rlkv.__version__ == version("lit_rlkv")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'lit_rlkv' has no attribute 'Generate'"):
        _ = lit_rlkv.Generate


@pytest.mark.parametrize(
    "name", ["lit_rlkv", "lit_rlkv.config", "lit_rlkv.fit", "lit_rlkv.evaluate", "lit_rlkv.export"]
)
def test_importing_the_package_or_a_command_line_imports_neither_torch_nor_transformers(name):
    code = f"import sys, {name}; assert not {{'torch', 'transformers', 'lightning'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
