"""The commands of README and of the site are commands that work; they are checked without being started."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_rlkv.audit import parse as parse_audit
from lit_rlkv.cli import compose_arguments
from lit_rlkv.config import CONF_DIR, check_keys, parse
from lit_rlkv.config.commands import EvaluateConfig, ExportConfig
from lit_rlkv.plan import parse as parse_plan
from lit_rlkv.report import parse as parse_report
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.sweep import compose as compose_run
from lit_rlkv.sweep import parse as parse_sweep
from lit_rlkv.sweeping.sweep_file import read_sweep
from lit_rlkv.trust import trusting
from tests.docs.pages import PAGES, ROOT, TRUST, shell_commands
from tests.saved_models import save_checkpoint
from tests.tiers import short_tier

FILES = {
    "pairs.jsonl": "tests/data/preferences.jsonl",
    "problems.jsonl": "tests/data/problems.jsonl",
    "samples.jsonl": "tests/data/samples.jsonl",
    "rewards.py:": "tests/data/rewards.py:",
}
"""Placeholders of a user's files, and their stand-ins."""
MODELS = (
    "./my-model",
    "...",
    "models/SmolLM2-135M-Instruct.Q4_1.gguf",
    "models/gemma-3-270m-q4_k_m.gguf",
)
"""Placeholders of models, and those that a command must fetch."""
GSM8K = ["task.dataset=tests/data/gsm8k", "task.name=null"]
SAVED = {"evaluate": EvaluateConfig, "export": ExportConfig}
FOREIGN = {"cd", "export", "git", "hf", "source", "tensorboard", "wandb"}
"""Programs that are not of this repository."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.M)


def commands_by_page() -> dict[str, list[tuple[str, ...]]]:
    """Return each command once, on the first page that has it; test_how_to.py runs those with trust."""
    seen: set[tuple[str, ...]] = set()
    found: dict[str, list[tuple[str, ...]]] = {}
    for page, text in PAGES.items():
        for words in shell_commands(text):
            if words and words not in seen and TRUST not in words:
                found.setdefault(page, []).append(words)
                seen.add(words)
    return found


COMMANDS = commands_by_page()
FIRST_READ = ("README.md", "docs/get-started/quickstart.md", "docs/reference/commands.md")


def check(words: tuple[str, ...]) -> None:
    """Check a command as its program does before any work, or raise an error."""
    program, *arguments = words
    name = Path(program).name
    if name == "srun":
        check(tuple(arguments))
    elif name in ("torchrun", "fabric", "sbatch"):
        check_fit(after_launcher(arguments))
    elif name == "lit-rlkv":
        check_program(arguments[0], arguments[1:])
    elif name in ("python", "python3"):
        check_python(arguments)
    elif name == "make":
        assert arguments[0] in TARGETS
    elif name == "pip":
        asked = {
            one for group in re.findall(r"\[([\w,]+)\]", " ".join(arguments)) for one in group.split(",")
        }
        assert asked <= EXTRAS.keys()
    else:
        assert name in FOREIGN, f"{program}: say in tests/docs/test_commands.py how this is checked"


def after_launcher(arguments: list[str]) -> list[str]:
    """Return the arguments for fit of a line with torchrun, fabric run or sbatch."""
    if "lit_rlkv.fit" in arguments:
        return arguments[arguments.index("lit_rlkv.fit") + 1 :]
    (script,) = [one for one in arguments if one.startswith("scripts/")]
    assert (ROOT / script).is_file()
    rest = arguments[arguments.index(script) + 1 :]
    return rest[1:] if script.endswith(".sbatch") else rest  # the first is the name of the run


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], "page", "exec")
    elif arguments[0] == "-m":
        module, *rest = arguments[1:]
        assert find_spec(module) is not None
        if module.count(".") == 1 and module.startswith("lit_rlkv."):
            check_program(module.partition(".")[2], rest)
    else:
        check_script(arguments[0], arguments[1:])


def check_program(program: str, arguments: list[str]) -> None:
    if program == "fit":
        check_fit(arguments)
    elif program == "audit":
        parse_audit([here(one) for one in arguments])
    elif program == "plan":
        parse_plan(arguments)
    elif program == "sweep":
        args = parse_sweep(arguments)
        sweep = read_sweep(ROOT / args.file, tuple(args.overrides))
        values = {
            key: str(each.low) if hasattr(each, "low") else each.choices[0]
            for key, each in sweep.space.items()
        }
        compose_run(sweep, values, Path("unused"))
    elif program == "report":
        # conf/ stands in for a run: it has a file config.yaml, too.
        parse_report([str(CONF_DIR) if one.startswith("runs/") else one for one in arguments])
    else:
        composed, _ = compose_arguments(program, arguments)
        parse(SAVED[program], composed)


def check_fit(arguments: list[str]) -> None:
    """Compose and check as fit does, but for a run that would have to exist."""
    given = [here(one) for one in arguments if not one.startswith(("--", "resume="))]
    with trusting([]):  # what a command trusts, it trusts alone
        cfg, hydra_cfg = compose_arguments("config", [*given, *(GSM8K if "task=gsm8k" in given else [])])
        cfg.model.path = FILES.get(cfg.model.path, cfg.model.path)  # of a recipe
        check_keys(cfg, hydra_cfg.runtime.choices, hydra_cfg.overrides.task)
        checked_config(cfg)


def here(argument: str) -> str:
    for name, file in FILES.items():
        argument = argument.replace(f"={name}", f"={file}")
    return argument


def check_script(path: str, arguments: list[str]) -> None:
    """Check that a script exists and knows the options that it is given."""
    source = (ROOT / path).read_text(encoding="utf-8")
    source += '"--record"' if "Parser(__doc__, " in source else ""  # command_line.py adds it
    assert [one for one in arguments if one.startswith("--") and f'"{one}"' not in source] == [], path


@pytest.fixture
def stand_in_for_a_model(tmp_path_factory, monkeypatch):
    folder = save_checkpoint(tmp_path_factory.mktemp("saved") / "model")
    for name in MODELS:
        monkeypatch.setitem(FILES, name, str(folder))


@pytest.mark.usefixtures("stand_in_for_a_model")
@pytest.mark.parametrize("page", short_tier(COMMANDS, FIRST_READ))
def test_every_command_of_a_page_passes_the_checks_of_its_program(page):
    for words in COMMANDS[page]:
        try:
            check(words)
        except Exception as error:
            raise AssertionError(" ".join(words)) from error


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "`python benchmarks/" in text])
def test_every_benchmark_that_a_sentence_names_knows_its_options(page):
    for path, arguments in re.findall(r"`(?:\w+=\w+ )?python (benchmarks/\w+\.py)([^`]*)`", PAGES[page]):
        check_script(path, arguments.split())
