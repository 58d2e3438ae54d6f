"""python -m lit_rlkv.plan: what fits a card, and how long it takes, by the settings of fit."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from lit_rlkv.cli import compose_arguments, run_command, split_config_dir
from lit_rlkv.config import Config, as_config_errors, check_keys, check_targets, parse_config, require
from lit_rlkv.config.composing import CONF_DIR
from lit_rlkv.units import human_bytes

USAGE = """python -m lit_rlkv.plan [settings of fit] [gpu=24GB|H100|...] [prompt=512] [to=FILE.yaml] [--json]
    gpu     a card or its memory; without it the device of this machine
    prompt  tokens of a prompt
    to      write the settings as a recipe; as DIR/recipe/NAME.yaml it is --config-dir DIR recipe=NAME
    --json  print values for programs"""
PROMPT = 512
MOST_HOST_BYTES = 2**46
"""Assumed of any machine: a plan for a card does not know the one that it is in."""


@dataclass(frozen=True)
class PlanArguments:
    """A config to plan, a card, and how to answer."""

    config: Config
    overrides: tuple[str, ...]
    gpu: str | None
    n_prompt: int
    to: Path | None
    as_json: bool


def main() -> None:
    """Run the command line; exit with 1 where the config does not fit."""
    if {"--help", "-h"} & {*sys.argv[1:]}:
        sys.stdout.write(f"{USAGE}\n")
        return
    run_command(parse, ("lit_rlkv.planning.models", "lit_rlkv.reporting.plan_screen"), plan)


def parse(arguments: Sequence[str]) -> PlanArguments:
    """Return what the arguments ask for.

    Raises:
        ConfigError: one is wrong.
    """
    own = {"gpu": "", "prompt": str(PROMPT), "to": ""}
    given = {name: value for name, _, value in (one.partition("=") for one in arguments) if name in own}
    overrides = [one for one in arguments if one != "--json" and one.partition("=")[0] not in own]
    own |= given
    for key in (one.partition("=")[0] for one in overrides):
        meant = get_close_matches(key, own, 1, 0.8)
        require(not meant, f"unknown key {key!r}: did you mean {''.join(meant)!r}?")
    is_number = own["prompt"].isdecimal() and len(own["prompt"]) < 9
    require(
        is_number and int(own["prompt"]) > 0,
        f"prompt must be the tokens of a prompt, got {own['prompt']}; give such as prompt={PROMPT}",
    )
    to = Path(own["to"]).expanduser() if own["to"] else None
    require(
        to is None or (to.suffix == ".yaml" and to.parent.is_dir() and not to.exists()),
        f"to={to} must be a new file NAME.yaml in a folder that exists, such as to=conf/recipe/mine.yaml",
    )
    cfg, hydra_cfg = compose_arguments("config", overrides)
    check_keys(cfg, dict(hydra_cfg.runtime.choices), list(hydra_cfg.overrides.task))
    return PlanArguments(
        parse_config(cfg), tuple(overrides), own["gpu"] or None, int(own["prompt"]), to, "--json" in arguments
    )


def plan(asked: PlanArguments) -> None:
    """Print the plan, and write its settings if asked to.

    Raises:
        ConfigError: a card, a model or a setting is wrong.
        SystemExit: with 1, the config does not fit.
    """
    from rich.console import Console

    from lit_rlkv.kvcache import CacheSpec
    from lit_rlkv.models.backbone import check_length
    from lit_rlkv.planning.cards import find_card
    from lit_rlkv.planning.models import pass_bytes_of, roles_of, teacher_bytes
    from lit_rlkv.planning.plan import Planner
    from lit_rlkv.planning.recipe import recipe
    from lit_rlkv.reporting.plan_screen import as_values, screen

    cfg = asked.config
    check_targets(cfg.source)
    n_own = cfg.fabric.devices if isinstance(cfg.fabric.devices, int) and cfg.fabric.devices > 0 else 1
    with as_config_errors("cache"):
        CacheSpec.of(cfg.cache)
    card, roles = find_card(asked.gpu), roles_of(cfg)
    memory = card.memory if card.is_gpu else card.memory // n_own
    card = replace(card, memory=memory - teacher_bytes(cfg))
    planner = Planner(
        cfg, roles, pass_bytes_of(cfg, roles, card), card, asked.n_prompt, n_own * cfg.fabric.num_nodes
    )
    require(
        planner.host_bytes <= MOST_HOST_BYTES,
        f"rollout.n_prompts={cfg.rollout.n_prompts}: records of all responses take "
        f"{human_bytes(planner.host_bytes)} of host memory, more than any machine has; lower it",
    )
    with as_config_errors("plan"):
        advice = f"lower rollout.max_new_tokens={cfg.rollout.max_new_tokens} or prompt={asked.n_prompt}"
        check_length(planner.policy, planner.n_columns, advice)
        rows = [planner.row(cache) for cache in planner.caches()]
        chosen = next(row for row in rows if row.cache == planner.cache)
        changes = planner.changes(chosen)
    given = (*asked.overrides, *planner.settings(chosen))
    settings = list({one.lstrip("+").partition("=")[0]: one for one in given}.values())
    command = f"python -m lit_rlkv.fit {shlex.join(settings)}"
    if cfg.model.path is not None and not any(one.startswith("task") for one in settings):
        command += "  # and your task, such as task=gsm8k reward=numeric"
    if asked.as_json:
        sys.stdout.write(json.dumps(as_values(planner, rows, chosen, changes), indent=1) + "\n")
    else:
        Console(soft_wrap=True).print(
            screen(planner, rows, chosen, changes, command), markup=False, highlight=False
        )
    if not chosen.fits:
        sys.exit(1 if asked.to is None else f"{asked.to} is not written: the config does not fit")
    if asked.to is not None:
        asked.to.write_text(recipe(split_config_dir(settings)[1], command), encoding="utf-8")
        sys.stderr.write(f"wrote {asked.to}; {_use_of(asked.to)}\n")


def _use_of(file: Path) -> str:
    """Return how fit takes a recipe, by where it lies."""
    folder = file.absolute().parent
    place = str(folder.parent) if folder.name == "recipe" else "DIR"
    options = [] if place == str(CONF_DIR) else ["--config-dir", place]
    command = f"python -m lit_rlkv.fit {shlex.join([*options, f'recipe={file.stem}'])}"
    return f"{'move it to a folder DIR/recipe for' if place == 'DIR' else 'it is'} {command}"


if __name__ == "__main__":
    main()
