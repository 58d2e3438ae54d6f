"""The console script lit-rlkv and its shell completion."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from lit_rlkv import __version__
from lit_rlkv.__main__ import COMMANDS, help_page, main
from lit_rlkv.completion import POLICY, SCRIPTS, complete
from lit_rlkv.config import CONF_DIR
from lit_rlkv.kvcache import POLICIES

ROOT = Path(__file__).parent.parent


def words(*line):
    return [word for word, _ in complete(line)]


def said(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["lit-rlkv", *arguments])
    main()
    return capsys.readouterr().out


def test_the_installed_script_is_the_function_that_runs_the_commands():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["lit-rlkv"].partition(":")
    assert getattr(import_module(module), function) is main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_with_a_main_function(name):
    assert callable(import_module(f"lit_rlkv.{name}").main)


def test_help_has_a_line_for_every_command_and_is_short():
    lines = help_page().splitlines()
    assert len(lines) <= 12
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
    assert said(monkeypatch, capsys, "completion", "fish") == SCRIPTS["fish"]
    with pytest.raises(SystemExit, match=r"error: unknown key 'cache\.buget'"):
        said(monkeypatch, capsys, "fit", "seed=1", "cache.buget=3")


def test_commands_groups_options_keys_and_values_are_completed():
    assert words("f") == ["fit"]
    assert words("completion", "") == ["bash", "zsh", "fish"]
    assert words("fit", "cache.pol") == ["cache.policy=", "cache.policy_options="]
    assert words("fit", "experiment=") == [
        f"experiment={path.stem}" for path in sorted((CONF_DIR / "experiment").glob("*.yaml"))
    ]
    assert words("fit", "fabric.strategy=") == [
        f"fabric.strategy={name}" for name in ("auto", "ddp", "fsdp2")
    ]
    assert words("export", "over") == ["overwrite="]
    assert words("export", "overwrite=") == ["overwrite=true", "overwrite=false"]
    assert "task=" in words("fit", "")
    assert words("nonsense=", "") == []


def test_the_keys_of_a_group_are_those_of_its_chosen_option():
    assert set(words("fit", "task=recall", "task.")) == {
        "task.n_pairs=", "task.n_queries=", "task.value_digits=",
    }  # fmt: skip
    assert {"task.n_terms=", "task.n_pairs="} < set(words("fit", "task."))


def test_the_policies_that_are_offered_are_those_that_exist():
    offered = {word.removeprefix(f"{POLICY}=") for word in words("fit", f"{POLICY}=")}
    assert offered == {*POLICIES, "dense"}


def test_run_folders_and_sweep_files_are_completed_as_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "arms.yaml").touch()
    assert words("fit", "resume=") == ["resume=auto", "resume=runs/first/"]
    assert words("evaluate", "ckpt=runs/f") == ["ckpt=runs/first/"]
    assert words("sweep", "sweeps/") == ["sweeps/arms.yaml"]
    assert words("sweep", "--jo") == ["--jobs"]
    assert words("sweep", "sweeps/arms.yaml", "cache.bud") == ["cache.budget="]


def test_bash_completes_by_the_script(tmp_path):
    program = tmp_path / "lit-rlkv"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lit_rlkv "$@"\n')
    program.chmod(0o755)
    lines = ["lit-rlkv ev", "lit-rlkv fit seed=1 cache.policy=sna", "lit-rlkv fit seed=1 optimizer.l"]
    asks = "\n".join(
        f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _lit_rlkv; echo \"${{COMPREPLY[@]}}\""
        for line in lines
    )
    process = subprocess.run(
        ["bash", "-c", f'eval "$(lit-rlkv completion bash)"\n{asks}'],
        cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    # After "=", which bash takes for the start of a word, only the rest is given.
    assert process.stdout.splitlines() == ["evaluate", "snapkv", "optimizer.lr="]
