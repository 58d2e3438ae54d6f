"""What a run is, from its config and its environment in plain types: for terminal, report and model card."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rlkv.config.options import leaves
from lit_rlkv.settings import DENSE, cache_label, show
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


def describe(config: Tree) -> dict[str, str]:
    """Return what a run trains and how, by heading; what the config does not tell is left out."""
    seed = config.get("seed")
    about = {
        "Task": call(config.get("task")),
        "Environment": call(config.get("environment")),
        "Model": _model(config.get("model", {})),
        "Algorithm": _algorithm(config),
        "Arm": _arm(config),
        "Cache": _cache(config),
        "Seed": "" if seed is None else str(seed),
    }
    return {heading: text for heading, text in about.items() if text}


def run_facts(
    config: Tree, environments: Sequence[Tree], stage_seconds: Mapping[str, float | int]
) -> dict[str, str]:
    """Return what a run is, where and when it ran, by heading; what its files do not tell is left out.

    Args:
        environments: environment.json, one entry for each start.
    """
    first: Tree = environments[0] if environments else {}
    last: Tree = environments[-1] if environments else {}
    git, date = last.get("git") or {}, _minute(first)
    resumed = f", resumed {len(environments) - 1}×, last {_minute(last)}" if len(environments) > 1 else ""
    changes = " with local changes" if git.get("is_dirty") else ""
    facts = {
        "Device": _device(last.get("device") or {}),
        "Commit": f"{git['commit'][:10]}{changes}" if git else "",
        "Date": f"{date} UTC{resumed}" if date else "",
        "Duration": human_seconds(sum(stage_seconds.values())) if stage_seconds else "",
        "Command": re.sub(r"^\S*/", "", str(first.get("command") or "")),
    }
    return describe(config) | {heading: text for heading, text in facts.items() if text}


def differing(configs: Mapping[str, Tree]) -> list[list[str]]:
    """Return a row for each key whose value is not the same in all runs: the key, and each run's value."""
    flat = {run: dict(leaves(config)) for run, config in configs.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    rows = [[key, *(show(values.get(key, "–")) for values in flat.values())] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def call(node: Any) -> str:
    """Return a config node as a call of its class, such as ChainSum(n_terms=5)."""
    if not isinstance(node, Mapping):
        return ""
    given = {name: value for name, value in node.items() if not str(name).startswith("_")}
    options = [f"{name}={show(value)}" for name, value in given.items() if value not in (None, {}, [])]
    name = _class(node)
    return f"{name}({', '.join(options)})" if name else ", ".join(options)


def _class(node: Any) -> str:
    """Return the name of the class or function that a node names."""
    return str((node or {}).get("_target_") or "").rpartition(".")[2]


def _model(node: Tree) -> str:
    """Return the path of a model, or the name and size of a preset."""
    preset = node.get("preset") or {}
    if node.get("path") or not preset:
        return str(node.get("path") or "")
    sizes = {"num_hidden_layers": "layers", "num_key_value_heads": "KV heads", "hidden_size": "wide"}
    found = [f"{preset[key]} {unit}" for key, unit in sizes.items() if key in preset]
    return ", ".join([f"{_class(preset) or 'model'} from random weights", *found])


def _algorithm(config: Tree) -> str:
    """Return the advantage estimator of GRPO's variants, or the loss; and the size of the run."""
    node = config.get("algorithm", {})
    loss = node.get("loss") or {}
    estimator = (node.get("advantage") or {}).get("estimator")
    kind = _class(loss.get("gain")) or _class(loss)
    name = str(estimator) if estimator and kind in ("GRPO", "") else kind
    ratio = " with one ratio per response" if loss.get("importance_sampling_level") == "sequence" else ""
    n_prompts = config.get("rollout", {}).get("n_prompts")
    if n_prompts is None or not {"n_iterations", "group_size"} <= node.keys():
        return f"{name}{ratio}"
    size = f"{node['n_iterations']} iterations of {n_prompts} prompts × {node['group_size']} responses"
    return f"{name}{ratio}, {size}"


def _arm(config: Tree) -> str:
    """Return the experiment's name and meaning, or the name of the correction's function; and the teacher."""
    correction, distillation = config.get("correction") or {}, config.get("distillation") or {}
    weights = _class(correction.get("weight_fn"))
    name, notes = CORRECTIONS.get(weights, weights), ""
    cache = config.get("cache", {})
    is_exact = cache.get("policy") == "dense" and not cache.get("dtype")
    if correction.get("samples_dense") or is_exact:
        name = "dense"
    elif correction.get("replays"):
        notes = "" if name == "naive" else f", with weights by {name}"
        name = "smd" if "direction" in distillation else "shadow"
    if distillation.get("model") is not None:
        notes += f", taught by {distillation['model']}"
    return (f"{name}: {METHODS[name]}" if name in METHODS else name) + notes


def _cache(config: Tree) -> str:
    """Return the label of the cache of rollouts, and the meaning of its sizes."""
    node = config.get("cache", {})
    if (config.get("correction") or {}).get("samples_dense"):
        return DENSE
    policy = str(node.get("policy", "")).rpartition(".")[2]
    if policy == DENSE:
        return cache_label(policy, node)
    if not {"policy", "budget", "interval"} <= node.keys():
        return ""
    prompt = "prompt + " * bool(node.get("protect_prompt"))
    return f"{cache_label(policy, node)} ({prompt}budget + interval slots)"


def _device(node: Tree) -> str:
    """Return the device's name and memory, or the CPU threads."""
    if "name" in node:
        return f"{node['name']}, {human_bytes(node['memory_bytes'])}"
    threads = f"threads: {node['n_threads']}" if node.get("n_threads") else ""
    return ", ".join(text for text in (str(node.get("type") or ""), threads) if text)


def _minute(start: Tree) -> str:
    """Return the time of a start to the minute."""
    return str(start.get("started_at") or "")[:16].replace("T", " ")
