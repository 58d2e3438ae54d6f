"""The texts of `--help`, `--help KEY` and `--help-all`."""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from textwrap import wrap
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.config.composing import PROGRAMS, SCHEMAS, composed, groups, hint_at, initialized, options_of
from lit_rlkv.config.errors import ConfigError
from lit_rlkv.config.options import Option, default_values, describe, keys_of, leaf_keys, show
from lit_rlkv.config.reference import described, option_keys
from lit_rlkv.config.unknown_keys import PRESETS

HELP, HELP_ALL = ("--help", "-h"), "--help-all"
WIDTH = 100
INDENT = 16
"""Column of the meanings in the short help."""

INTRODUCTION = {
    "config": """\
RL post-training of language models on compressed rollouts that the learner replays exactly.

Examples
  python -m lit_rlkv.fit                                      Shadow Mask Distillation, the default
  python -m lit_rlkv.fit debug=fast                           the whole path in under a minute
  python -m lit_rlkv.fit experiment=tis seed=1                another method
  python -m lit_rlkv.fit experiment=rlhf                      learned reward and critic on one backbone
  python -m lit_rlkv.fit cache.policy=snapkv cache.budget=12  another cache
  python -m lit_rlkv.fit 'stages=[rl,eval]'                   start from the SFT model of an earlier run
  python -m lit_rlkv.fit recipe=llm model.path=./my-model     your own checkpoint
  python -m lit_rlkv.fit resume=runs/NAME                     resume an interrupted run""",
    "evaluate": """\
Accuracy and pass@k of a saved run with intervals, for each policy at each budget; every sample as JSONL.

Examples
  python -m lit_rlkv.evaluate ckpt=runs/NAME
  python -m lit_rlkv.evaluate ckpt=runs/NAME 'budgets=[8,12]' 'policies=[snapkv,h2o]'
  python -m lit_rlkv.evaluate ckpt=runs/NAME n_samples=8 temperature=1 'pass_at_k=[1,8]'""",
    "export": """\
A saved run's policy for plain transformers and peft: the merged model, the adapter, and a model card.

Examples
  python -m lit_rlkv.export ckpt=runs/NAME to=my-model
  python -m lit_rlkv.export ckpt=runs/NAME/checkpoints/iteration-000130 to=my-model dtype=bfloat16""",
}
"""First lines of the help, by the config's name in conf/."""
PRESET_HELP = {
    "experiment": "A whole method: sets the groups below.",
    "recipe": "Settings for a kind of model; llm is for a pretrained one.",
    "debug": "Settings to try the code; fast takes under a minute.",
}


def asked_help(name: str, arguments: Sequence[str]) -> str | None:
    """Return the help that a command line asks for; None if it asks for none.

    Raises:
        ConfigError: the settings on it do not compose, or there is no such key.
    """
    rest = [argument for argument in arguments if not argument.startswith("-")]
    overrides = [argument for argument in rest if "=" in argument or argument.startswith("~")]
    topics = [argument for argument in rest if argument not in overrides and argument != "help"]
    if HELP_ALL in arguments:
        return full_help(name, overrides)
    if not {*HELP} & {*arguments}:
        return None
    return help_on(name, topics, overrides) if topics else help_text(name, overrides)


def help_text(name: str, overrides: Sequence[str] = ()) -> str:
    """Return the short help: examples, the keys, and a line or two for each group of keys.

    Raises:
        ConfigError: the overrides do not compose.
    """
    cfg, schema = composed(name, overrides), SCHEMAS[name]
    program = f"python -m lit_rlkv.{PROGRAMS.get(name, name)}"
    lines = [INTRODUCTION[name], "", "Keys: set one with KEY=VALUE"]
    for key, _, declared, kind in keys_of(schema):
        if not is_dataclass(kind) and not declared.is_chosen:
            lines += aligned(f"{key}={_shown(cfg, key)}", _meaning(cfg, key, declared), 2 * INDENT)
    if name == "config":
        lines += ["", "Groups: choose with GROUP=OPTION, set a key with GROUP.KEY=VALUE"]
        for group, (meaning, keys) in _groups(schema, cfg).items():
            options = options_of(group)
            said = [meaning, *([f"Options: {', '.join(options)}."] if options else [])]
            lines += aligned(
                group, " ".join([*said, *([f"Keys: {', '.join(keys)}."] if keys else [])]), INDENT
            )
    example = "cache" if name == "config" else next(keys_of(schema))[0]
    return "\n".join(
        [
            *lines,
            "",
            f"{program} --help {example:<10} a group or key in full: types, ranges, options",
            f"{program} --help-all        all of them",
            f"{program} --cfg job         the composed config",
        ]
    )


def full_help(name: str, overrides: Sequence[str] = ()) -> str:
    """Return the help with every key: value, type, range and meaning, and the options of the groups.

    Raises:
        ConfigError: the overrides do not compose.
    """
    cfg = composed(name, overrides)
    lines = [INTRODUCTION[name], "", "Keys: set one with KEY=VALUE"]
    lines += [line for _, entry in _key_entries(SCHEMAS[name], cfg, "") for line in entry]
    if name == "config":
        lines += ["", "Groups: choose with GROUP=OPTION; then set the keys of the option by name"]
        for group in groups():
            lines += ["", group, *_options(group)]
    return "\n".join(lines)


def help_on(name: str, topics: Sequence[str], overrides: Sequence[str] = ()) -> str:
    """Return the help on groups or keys, in full.

    Raises:
        ConfigError: the overrides do not compose, or there is no such group or key.
    """
    cfg = composed(name, overrides)
    return "\n\n".join("\n".join(_on(name, topic, cfg)) for topic in topics)


def _on(name: str, topic: str, cfg: DictConfig) -> list[str]:
    """Return the help on one group or key, or on the node that a key of an option lies in."""
    entries = [*_key_entries(SCHEMAS[name], cfg, "")]
    found = [lines for key, lines in entries if f"{key}.".startswith(f"{topic}.")]
    if not found and OmegaConf.select(cfg, topic) is not None:
        found = [lines for key, lines in entries if topic.startswith(f"{key}.")]
    options = [*_options(topic)] if name == "config" and topic in groups() else []
    if not found and not options:
        with initialized():
            raise ConfigError(f"--help {topic}: there is no such key or group; {hint_at(topic, name)}")
    known = _groups(SCHEMAS[name], cfg) if name == "config" else {}
    title = wrap(f"{topic}: {known[topic][0]}", WIDTH) if topic in known else []
    return [*title, *(line for lines in found for line in lines), *(["Options", *options] if options else [])]


def _groups(schema: type, cfg: DictConfig) -> dict[str, tuple[str, list[str]]]:
    """Return the meaning and the names of the keys of each group, as it stands in the config."""
    found: dict[str, tuple[str, list[str]]] = {name: (PRESET_HELP[name], []) for name in PRESETS}
    for name, _, declared, kind in keys_of(schema):
        if is_dataclass(kind):
            found[name] = ((kind.__doc__ or "").strip(), [key for key, _, _ in leaf_keys(cast(type, kind))])
        elif declared.is_chosen:
            node = cfg[name] or {}
            keys = [str(key) for key in node if not str(key).startswith("_")]
            found[name] = (f"{declared.help[0].upper()}{declared.help[1:]}.", keys)
    return found


def _key_entries(schema: type, cfg: DictConfig, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each key of a schema with its lines: value, type and range, meaning."""
    for name, _, declared, kind in keys_of(schema):
        key = f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _key_entries(cast(type, kind), cfg[name], f"{key}.")
            continue
        is_filled = not OmegaConf.is_missing(cfg, name) and isinstance(cfg[name], DictConfig) and cfg[name]
        shown = key if is_filled else f"{key}={_shown(cfg, name)}"
        text = f"{describe(kind, declared)}: {_meaning(cfg, name, declared)}"
        values = [line for one in _flat(cfg[name], key) for line in _wrapped(one, 6)] if is_filled else []
        yield key, [f"  {shown}", *_wrapped(text, 6), *values]


def _flat(node: DictConfig, prefix: str) -> Iterator[str]:
    """Yield every `key=value` below a node."""
    for name in (str(name) for name in node if name != "_partial_"):
        key = f"{prefix}.{name}"
        is_given = not OmegaConf.is_missing(node, name)
        if is_given and isinstance(node[name], DictConfig) and node[name]:
            yield from _flat(node[name], key)
        else:
            yield f"{key}={_shown(node, name)}"


def _options(group: str) -> Iterator[str]:
    """Yield the options of a group with their meanings and keys."""
    for option in options_of(group):
        yield f"  {group}={option}"
        yield from _wrapped(described(group, option), 6)
        for key, value, comment in option_keys(group, option):
            is_missing = value == "???"
            text = f"{comment} (must be given)".lstrip() if is_missing else comment
            given = "..." if is_missing else value
            yield from aligned(f"{key}={given}" if given else key, text, 60, indent=6)


def schema_help(schema: type, prefix: str = "") -> list[str]:
    """Return the lines on every key of a schema, with its default."""
    cfg = OmegaConf.create({name: _plain(value) for name, value in default_values(schema).items()})
    return [line for _, lines in _key_entries(schema, cfg, prefix) for line in lines]


def _plain(value: Any) -> Any:
    return "???" if value is MISSING else value


def aligned(head: str, text: str, column: int, indent: int = 2) -> list[str]:
    """Return lines with a text beside a head, or below it where the head is long."""
    lines, start = _wrapped(text, column), " " * indent + head
    if len(start) + 2 > column or not lines:
        return [*_wrapped(head, indent), *lines]
    return [f"{start:<{column}}{lines[0].lstrip()}", *lines[1:]]


def _wrapped(text: str, column: int) -> list[str]:
    indent = " " * column
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _meaning(cfg: DictConfig, name: str, declared: Option) -> str:
    return f"{declared.help} (must be given)" if OmegaConf.is_missing(cfg, name) else declared.help


def _shown(cfg: DictConfig, name: str) -> str:
    """Return the value of a key as a command line takes it."""
    value: Any = "..." if OmegaConf.is_missing(cfg, name) else cfg[name]
    return show(list(value) if OmegaConf.is_list(value) else {} if value == {} else value)
