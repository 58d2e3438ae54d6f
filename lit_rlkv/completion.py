"""lit-rlkv completion SHELL: shell completion of commands, config groups, their options, keys and values.

The scripts ask `lit-rlkv completion words WORD ...` for what the last word may become.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from lit_rlkv.__main__ import COMMANDS
from lit_rlkv.config import AUTO, CONF_DIR
from lit_rlkv.config.composing import PROGRAMS, SCHEMAS, groups, options_of
from lit_rlkv.config.options import Option, leaf_keys, leaves, show

BASH = r"""_lit_rlkv() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$' \t\n'
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local current="${words[${#words[@]}-1]}" found
    # bash replaces only what follows the last "=", which is one of its word breaks
    local kept="${current%"${current##*=}"}"
    [[ $COMP_WORDBREAKS == *=* ]] || kept=""
    COMPREPLY=()
    while IFS=$'\t' read -r found _; do
        COMPREPLY+=("${found#"$kept"}")
    done < <("${words[0]}" completion words "${words[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/.] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _lit_rlkv lit-rlkv
"""
ZSH = r"""#compdef lit-rlkv
_lit_rlkv() {
    local line
    local -a open whole open_shown whole_shown
    for line in "${(@f)$("${words[1]}" completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -z $line ]] && continue
        if [[ ${line%%$'\t'*} == *[=/.] ]]; then
            open+=("${line%%$'\t'*}") open_shown+=("${line/$'\t'/  }")
        else
            whole+=("${line%%$'\t'*}") whole_shown+=("${line/$'\t'/  }")
        fi
    done
    (( $#open )) && compadd -l -S '' -d open_shown -a open
    (( $#whole )) && compadd -l -d whole_shown -a whole
    return 0
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _lit_rlkv lit-rlkv
"""
FISH = r"""function __lit_rlkv_words
    set -l before (commandline -opc)
    $before[1] completion words $before[2..-1] (commandline -ct) 2>/dev/null
end
complete -c lit-rlkv -f -a '(__lit_rlkv_words)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
RUNS, FOLDERS = ("resume", "ckpt"), ("runs_dir", "to", "model.path")
"""Keys whose values are run folders, and other folders."""
POLICY = "cache.policy"
SWEEP_OPTIONS = ("--jobs", "--max-runs", "--dir", "--wandb")

Words = Iterator[tuple[str, str]]
"""Words with their meanings, which may be empty."""


def main() -> None:
    """Print the script of a shell, or the words that complete a command line."""
    shell, *words = sys.argv[1:] or [""]
    if shell == "words":
        found = sorted(dict(complete(words)).items())
        sys.stdout.write("".join(f"{word}\t{meaning}\n" for word, meaning in found))
    elif shell in SCRIPTS:
        sys.stdout.write(SCRIPTS[shell])
    elif shell in ("--help", "--help-all", "-h"):
        sys.stdout.write(f"{__doc__}\n\n  lit-rlkv completion {'|'.join(SCRIPTS)}\n")
    else:
        sys.exit(
            f"error: completion needs one of {', '.join(SCRIPTS)}, got {shell or 'nothing'}; "
            'eval "$(lit-rlkv completion bash)" switches it on'
        )


def complete(words: Sequence[str]) -> Words:
    """Yield what the last word, which may be empty, may become; the words before it stand after lit-rlkv."""
    *before, word = words or [""]
    if not before:
        found: Words = iter({**COMMANDS, "--help": "", "--version": ""}.items())
    elif before[0] == "completion":
        found = iter((shell, "") for shell in SCRIPTS)
    else:
        found = _arguments(before[0], before[1:], word)
    return ((one, meaning) for one, meaning in found if one.startswith(word))


def _arguments(command: str, before: Sequence[str], word: str) -> Words:
    if command == "sweep":
        yield from ((option, "") for option in SWEEP_OPTIONS)
        if "=" not in word:
            yield from _paths(word, ".yaml")
        command = "fit"  # overrides of all runs
    program = next((name for name in SCHEMAS if PROGRAMS.get(name, name) == command), None)
    if program is None:
        yield from _paths(word) if command in COMMANDS else ()
        return
    key, sign, value = word.partition("=")
    keys = {key: (kind, declared) for key, kind, declared in leaf_keys(SCHEMAS[program])}
    group_names = groups() if program == "config" else []
    if sign:
        values = _values(key, value, keys, group_names)
        yield from ((f"{key}={one}", meaning) for one, meaning in values)
        return
    yield from (("--help", "every key with its meaning"), ("--cfg", "print the composed config"))
    yield from ((f"{group}=", f"option of the group {group}") for group in group_names)
    yield from (
        (f"{name}=", declared.help) for name, (_, declared) in keys.items() if name not in group_names
    )
    group = key.partition(".")[0]
    if group in group_names:
        yield from ((f"{name}=", "") for name in _keys_of_options(group, before))


def _values(key: str, value: str, keys: Mapping[str, tuple[Any, Option]], groups: Sequence[str]) -> Words:
    if key in groups:
        yield from ((option, "") for option in options_of(key))
    elif key in RUNS:
        if key == "resume":
            yield (AUTO, "the newest run with this config")
        yield from _paths(value or "runs/")
    elif key in FOLDERS:
        yield from _paths(value)
    elif key in keys:
        kind, declared = keys[key]
        # The names of the policies stand first in the meaning; their module imports torch.
        chosen = declared.help.partition(",")[0].split() if key == POLICY else _choices(kind)
        yield from ((one, "") for one in chosen)


def _choices(kind: Any) -> list[str]:
    """Return the values of a type that has few of them."""
    if get_origin(kind) is Literal:
        return [show(value) for value in get_args(kind)]
    if kind is bool:
        return ["true", "false"]
    if kind is type(None):
        return ["null"]
    members = () if get_origin(kind) is tuple else get_args(kind)
    return [value for one in members for value in _choices(one)]


def _keys_of_options(group: str, before: Sequence[str]) -> Iterator[str]:
    """Yield the keys of the chosen option of a group; of all options if none is chosen."""
    chosen = [word.partition("=")[2] for word in before if word.startswith(f"{group}=")]
    for option in chosen[-1:] or options_of(group):
        path = CONF_DIR / group / f"{option}.yaml"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not text.startswith("# @package _global_"):
            keys = (key for key, _ in leaves(yaml.safe_load(text), group))
            yield from (key for key in keys if "._" not in key and not key.startswith(f"{group}.defaults"))


def _paths(start: str, ending: str = "") -> Words:
    """Yield folders that begin with this text, and files with this ending."""
    folder, _, name = start.rpartition("/")
    place = f"{folder}/" if "/" in start else ""
    root = Path(place or ".").expanduser()
    for path in root.iterdir() if root.is_dir() else ():
        if path.name.startswith(name) and (name or not path.name.startswith(".")):
            if path.is_dir():
                yield (f"{place}{path.name}/", "")
            elif ending and path.name.endswith(ending):
                yield (f"{place}{path.name}", "")


if __name__ == "__main__":
    main()
