"""The keys of each command line with their meanings, for `--help` and for docs/reference/config.md.

python -m lit_rlkv.config.reference > docs/reference/config.md
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.config.composing import CONF_DIR, SCHEMAS, composed, options_of
from lit_rlkv.config.options import Option, default_values, describe, keys_of, show

INTRODUCTION = {
    "config": """\
lit_rlkv: RL post-training of language models on compressed rollouts that the learner replays exactly.

  python -m lit_rlkv.fit [group=option ...] [key=value ...]

Examples
  python -m lit_rlkv.fit                                      Shadow Mask Distillation, the default
  python -m lit_rlkv.fit experiment=tis seed=1                or dense naive mis sparse_rl shadow smd
  python -m lit_rlkv.fit experiment=rlhf                      learned reward and critic on one backbone
  python -m lit_rlkv.fit cache.policy=snapkv cache.budget=12  another cache
  python -m lit_rlkv.fit 'stages=[rl,eval]'                   start from the SFT model of an earlier run
  python -m lit_rlkv.fit recipe=llm model.path=./my-model     your own checkpoint
  python -m lit_rlkv.fit debug=fast                           the whole path in under a minute
  python -m lit_rlkv.fit resume=runs/...                      resume an interrupted run

--cfg job prints the composed config and runs nothing.""",
    "evaluate": """\
Accuracy and pass@k of a saved run with intervals, for each policy at each budget; every sample as JSONL.

  python -m lit_rlkv.evaluate ckpt=runs/NAME [key=value ...]""",
    "export": """\
A saved run's policy for plain transformers and peft: the merged model, the adapter alone, and a model card.

  python -m lit_rlkv.export ckpt=runs/NAME to=DIR [key=value ...]""",
}
"""First lines of `--help`, by the config's name in conf/."""


def help_text(name: str, overrides: list[str]) -> str:
    """Return the text of `--help`: groups with their options, and every key with its value and meaning.

    Args:
        name: of the config in conf/.
        overrides: other arguments of the command line; the values are those that they compose.

    Raises:
        ConfigError: the overrides do not compose.
    """
    cfg = composed(name, overrides)
    lines = [INTRODUCTION[name], ""]
    if name == "config":
        groups = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())
        lines += ["Groups (choose with group=option)"]
        lines += [*(f"  {group}: {', '.join(options_of(group))}" for group in groups), ""]
    return "\n".join([*lines, "Keys (override with key=value)", *_help_lines(SCHEMAS[name], cfg, "")])


def _help_lines(schema: type, cfg: DictConfig, prefix: str) -> Iterator[str]:
    for name, _, declared, kind in keys_of(schema):
        key = f"{prefix}{name}"
        value: Any = "???" if OmegaConf.is_missing(cfg, name) else cfg[name]
        if is_dataclass(kind):
            yield from _help_lines(cast(type, kind), value, f"{key}.")
        elif isinstance(value, DictConfig) and value:
            yield f"  {key}: {declared.help}"
            node = OmegaConf.to_yaml(value).rstrip()
            yield from (f"      {line}" for line in node.splitlines())
        else:
            yield f"  {f'{key}={_shown(value)}':<44} {declared.help}"


def _shown(value: Any) -> str:
    return show(list(value) if OmegaConf.is_list(value) else {} if value == {} else value)


def reference_page() -> str:
    """Return docs/reference/config.md."""
    lines = [
        "# Config reference",
        "",
        "Every key of `python -m lit_rlkv.fit`. Set one on the command line by `key=value`;",
        "[Commands](commands.md) has the other programs.",
        "Generated from `lit_rlkv/config/schema.py` and `conf/` by `python -m lit_rlkv.config.reference`.",
        "",
        "## Keys",
        "",
        *key_table(SCHEMAS["config"]),
    ]
    lines += ["", "## Options of the groups", "", "Choose one by `group=option`; then set its keys by name."]
    for group in sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir()):
        lines += ["", f"### {group} options", ""]
        for option in options_of(group):
            lines += [f"- `{group}={option}`{_described(group, option)}", *_option_keys(group, option)]
    return "\n".join(lines) + "\n"


def key_table(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a schema as a table, and then those of the schemas below it."""
    yield from ("| key | default | value | meaning |", "|---|---|---|---|")
    below: list[tuple[str, type]] = []
    defaults = default_values(schema)
    for name, _, declared, kind in keys_of(schema):
        key = f"{prefix}{name}"
        if is_dataclass(kind):
            below.append((key, cast(type, kind)))
            continue
        cells = (f"`{key}`", _default(defaults, name, declared), describe(kind, declared))
        # Bare, Markdown would read its underscores as emphasis.
        meaning = re.sub(r"\b_\w+_\b", r"`\g<0>`", declared.help)
        yield f"| {' | '.join(cell.replace('|', '/') for cell in (*cells, meaning))} |"
    for key, inner in below:
        yield from ("", f"### {key}", "", (inner.__doc__ or "").strip(), "")
        yield from key_table(inner, f"{key}.")


def _default(defaults: dict[str, Any], name: str, declared: Option) -> str:
    if declared.is_chosen:
        return "by its group"
    value = defaults[name]
    if value == "???":
        return "must be given"
    return f"`{value['_target_']}`" if isinstance(value, dict) and value else f"`{show(value)}`"


def _described(group: str, option: str) -> str:
    """Return what the first comment of an option's file says, and the keys that the option has."""
    text = (CONF_DIR / group / f"{option}.yaml").read_text(encoding="utf-8")
    comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")]
    said = [line for line in comments if not line.startswith(("@package", "python -m"))]
    return f": {' '.join(said)}" if said else ""


def _option_keys(group: str, option: str) -> Iterator[str]:
    """Yield the keys of an option's file with values and comments; a preset sets keys of other groups."""
    text = (CONF_DIR / group / f"{option}.yaml").read_text(encoding="utf-8")
    if "@package _global_" in text:
        return
    above: list[str] = []
    for line in text.splitlines():
        read = re.match(r"( *)(\w+):(.*?)(?: +# (.*))?$", line)
        if read is None or read[2] in ("defaults", "_partial_"):
            continue
        indent, name, value, comment = read.groups()
        above = [*above[: len(indent) // 2], name]
        given = f" = `{value.strip()}`" if value.strip() else ""
        said = f": {comment}" if comment else ""
        if given or said:
            yield f"    - `{'.'.join([group, *above])}`{given}{said}"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
