"""The console scripts and their shell completion."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from lit_rlkv import __version__
from lit_rlkv.__main__ import COMMANDS, help_page, main

ROOT = Path(__file__).parent.parent


def said(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["lit-rlkv", *arguments])
    main()
    return capsys.readouterr().out


def test_the_installed_scripts_are_functions():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["lit-rlkv"] == "lit_rlkv.__main__:main"
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_with_a_main_function(name):
    assert callable(import_module(f"lit_rlkv.{name}").main)


def test_help_has_a_line_for_every_command_and_is_short():
    lines = help_page().splitlines()
    assert len(lines) <= 6 + len(COMMANDS)
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["lit-rlkv", *COMMANDS]


def test_the_version_and_mistakes_are_told_without_torch():
    code = (
        "import sys; from lit_rlkv.__main__ import main\n"
        "for argument in ('--version', 'fti', 'debug=fast'):\n"
        "    sys.argv = ['lit-rlkv', argument]\n"
        "    try: main()\n"
        "    except SystemExit as error: print(error)\n"
        "assert not {'torch', 'transformers', 'hydra'} & sys.modules.keys()\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [
        f"lit_rlkv {__version__}",
        "error: unknown command 'fti': did you mean 'fit'?",
        "error: 'debug=fast' must come after a command; write lit-rlkv fit debug=fast",
    ]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_a_command_gets_the_other_arguments(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"error: unknown key 'cache\.buget'"):
        said(monkeypatch, capsys, "fit", "seed=1", "cache.buget=3")


def test_bash_completes_keys_and_options_by_hydra(tmp_path):
    program = tmp_path / "lit-rlkv-fit"
    program.write_text(f"#!{sys.executable}\nfrom lit_rlkv.fit import main\nmain()\n")
    program.chmod(0o755)
    lines = ["lit-rlkv-fit seed=1 cache.budg", "lit-rlkv-fit experiment=sha"]
    asks = "\n".join(
        f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_CWORD={len(line.split()) - 1}; "
        'hydra_bash_completion; echo "${COMPREPLY[@]}"'
        for line in lines
    )
    process = subprocess.run(
        ["bash", "-c", f'eval "$(lit-rlkv-fit -sc install=bash)"\n{asks}'],
        cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert process.stdout.splitlines() == [
        "cache.budget= cache.budget_bounds= cache.budget_profile=",
        "experiment=shadow",
    ]
