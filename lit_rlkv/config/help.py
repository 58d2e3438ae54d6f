"""The texts of `--help`, `--help KEY` and `--help-all`."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from lit_rlkv.config.composing import PROGRAMS, SCHEMAS, groups, hint_at, initialized, options_of
from lit_rlkv.config.errors import ConfigError
from lit_rlkv.config.options import describe, leaf_keys
from lit_rlkv.config.reference import described, option_lines

HELP, HELP_ALL = {"--help", "-h"}, "--help-all"
WIDTH = 100
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


def asked_help(name: str, arguments: Sequence[str]) -> str | None:
    """Return the help that a command line asks for; None if it asks for none.

    Raises:
        ConfigError: there is no such key.
    """
    if HELP_ALL in arguments:
        return "\n".join([INTRODUCTION[name], "", *_keys(name, ""), *_all_options(name)])
    if not HELP & {*arguments}:
        return None
    topics = [argument for argument in arguments if "=" not in argument and argument[0] not in "-~"]
    if topics:
        return "\n".join(line for topic in topics for line in _on(name, topic))
    program = f"python -m lit_rlkv.{PROGRAMS.get(name, name)}"
    if name == "config":
        below = ["Groups: choose with GROUP=OPTION, set a key with GROUP.KEY=VALUE"]
        for group in groups():
            below += _wrapped(f"{group}: {', '.join(options_of(group))}", 2)
    else:
        below = ["Keys: set one with KEY=VALUE", *_keys(name, "")]
    ends = {"--help KEY": "a key or group in full", HELP_ALL: "all", "--cfg job": "the composed config"}
    shown = [f"{program} {option:<11} {meaning}" for option, meaning in ends.items()]
    return "\n".join([INTRODUCTION[name], "", *below, "", *shown])


def _on(name: str, topic: str) -> list[str]:
    """Return the help on one group or key."""
    lines = [*_keys(name, topic)]
    if name == "config" and topic in groups():
        lines += _options(topic)
    if not lines:
        with initialized():
            raise ConfigError(f"--help {topic}: there is no such key or group; {hint_at(topic, name)}")
    return lines


def _keys(name: str, topic: str) -> Iterator[str]:
    """Yield the keys at and below a topic, each with type, range and meaning."""
    for key, kind, declared in leaf_keys(SCHEMAS[name]):
        if not topic or f"{key}.".startswith(f"{topic}."):
            yield f"  {key}"
            yield from _wrapped(f"{describe(kind, declared)}: {declared.help}", 6)


def _all_options(name: str) -> Iterator[str]:
    for group in groups() if name == "config" else ():
        yield from _options(group)


def _options(group: str) -> Iterator[str]:
    """Yield the options of a group with their meanings and keys."""
    for option in options_of(group):
        yield f"  {group}={option}"
        for line in (described(group, option), *option_lines(group, option)):
            yield from _wrapped(line.replace("`", ""), 6)


def _wrapped(text: str, column: int) -> list[str]:
    indent = " " * column
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
