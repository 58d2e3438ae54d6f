"""The header of a report: what a run is, from its config and its environment."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rlkv.config.options import leaves, show
from lit_rlkv.units import human_bytes, human_seconds

Tree = Mapping[str, Any]
"""A config or an environment in plain types."""

CORRECTIONS = {
    "unweighted": "naive",
    "truncated": "tis",
    "masked": "mis",
    "sequence_truncated": "sequence_tis",
    "sequence_masked": "sequence_mis",
}
"""Name of the experiment for weight functions that are called otherwise."""

NOTHING: tuple[Any, ...] = (None, {}, [])
"""Values of options that are not set."""

METHODS = {
    "dense": "dense rollouts, no eviction",
    "smd": "exact replay and Shadow Mask Distillation",
    "shadow": "exact replay of the evictions",
    "naive": "dense learner, no correction",
    "tis": "dense learner, truncated importance sampling",
    "mis": "dense learner, masked importance sampling",
    "sequence_tis": "dense learner, truncated importance sampling per response",
    "sequence_mis": "dense learner, masked importance sampling per response",
    "sparse_rl": "dense learner, rejection and reweighting of Sparse-RL",
}
"""Meaning of each arm (way to train on compressed rollouts)."""


def run_facts(
    config: Tree, environments: Sequence[Tree], stage_seconds: Mapping[str, float | int]
) -> dict[str, str]:
    """Return the facts of a run by heading; those that its files do not tell are left out.

    Args:
        environments: environment.json, one entry for each start.
    """
    first: Tree = environments[0] if environments else {}
    last: Tree = environments[-1] if environments else {}
    facts = {
        "Task": target(config.get("task")),
        "Model": model(config.get("model", {})),
        "Arm": arm(config),
        "Algorithm": algorithm_name(config.get("algorithm", {})),
        "Cache": cache(config.get("cache", {})),
        "Seed": _text(config.get("seed")),
        "Device": device(last.get("device") or {}),
        "Commit": commit(last.get("git")),
        "Date": date(first, last, len(environments)),
        "Duration": human_seconds(sum(stage_seconds.values())) if stage_seconds else "",
        "Command": re.sub(r"^\S*/", "", _text(first.get("command"))),
    }
    return {heading: text for heading, text in facts.items() if text}


def target(node: Any) -> str:
    """Return a config node as a call of its class, such as ChainSum(n_terms=5)."""
    if not isinstance(node, Mapping):
        return ""
    given = {name: value for name, value in node.items() if not name.startswith("_") and value not in NOTHING}
    options = ", ".join(f"{name}={show(value)}" for name, value in given.items())
    name = _last(node.get("_target_"))
    return f"{name}({options})" if name else options


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _last(dotted: Any) -> str:
    return _text(dotted).rpartition(".")[2]


def model(node: Tree) -> str:
    """Return the path of a model, or the name and size of a preset."""
    if node.get("path"):
        return str(node["path"])
    preset = node.get("preset") or {}
    if "num_hidden_layers" not in preset:
        return target(preset) if preset else ""
    heads, width = (_text(preset.get(name)) for name in ("num_key_value_heads", "hidden_size"))
    layers = f"{preset['num_hidden_layers']} layers" + (f" of {heads} KV heads" if heads else "")
    size = layers + (f", width {width}" if width else "")
    return f"{_last(preset.get('_target_')) or 'model'}, from scratch: {size}"


def arm(config: Tree) -> str:
    """Return the experiment's name and meaning; other corrections are named by their function."""
    correction = config.get("correction") or {}
    weights = _last((correction.get("weight_fn") or {}).get("_target_") or "")
    name = CORRECTIONS.get(weights, weights)
    if correction.get("samples_dense") or config.get("cache", {}).get("policy") == "dense":
        name = "dense"
    elif correction.get("replays"):
        replay = "smd" if config.get("distillation") else "shadow"
        return f"{replay}: {METHODS[replay]}" + ("" if name == "naive" else f", with weights by {name}")
    return f"{name}: {METHODS[name]}" if name in METHODS else name


def algorithm_name(node: Tree) -> str:
    """Return the advantage estimator of GRPO's variants, or the class of the loss; and the group size."""
    if not node:
        return ""
    loss = node.get("loss") or {}
    estimator, kind = (node.get("advantage") or {}).get("estimator"), _last(loss.get("_target_"))
    name = str(estimator) if estimator and kind in ("GRPO", "") else kind
    ratio = " with one ratio per response" if loss.get("importance_sampling_level") == "sequence" else ""
    group_size = _text(node.get("group_size"))
    size = f"{group_size} responses to a prompt" if group_size else ""
    return ", ".join(text for text in (f"{name}{ratio}", size) if text)


def cache(node: Tree) -> str:
    """Return the policy and size of a cache, such as random 16+5."""
    if node.get("policy") == "dense":
        return "dense"
    if not {"policy", "budget", "interval"} <= node.keys():
        return ""
    return f"{node['policy']} {node['budget']}+{node['interval']} (budget + interval slots)"


def device(node: Tree) -> str:
    """Return the device's name and memory, or the CPU threads."""
    if "name" in node:
        return f"{node['name']}, {human_bytes(node['memory_bytes'])}"
    threads, cpus = (_text(node.get(name)) for name in ("n_threads", "n_cpus"))
    used = f"threads: {threads}" + (f" of {cpus}" if cpus else "") if threads else ""
    return ", ".join(text for text in (_text(node.get("type")), used) if text)


def commit(git: Tree | None) -> str:
    """Return the first letters of the commit, and if files differed from it."""
    return f"{git['commit'][:10]}{' with local changes' if git.get('is_dirty') else ''}" if git else ""


def date(first: Tree, last: Tree, n_starts: int) -> str:
    """Return when a run started, and when it resumed last."""
    started, resumed = (_text(entry.get("started_at"))[:16].replace("T", " ") for entry in (first, last))
    if not started:
        return ""
    return f"{started} UTC" if n_starts == 1 else f"{started} UTC, resumed {n_starts - 1}×, last {resumed}"


def differing(configs: Mapping[str, Tree]) -> list[list[str]]:
    """Return a row for each key whose value is not the same in all runs: the key, and each run's value."""
    flat = {run: dict(leaves(config)) for run, config in configs.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    rows = [[key, *(show(values.get(key, "–")) for values in flat.values())] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
