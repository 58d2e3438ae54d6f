"""Hints for unknown keys: the key that a TRL or verl name means here, or a similar spelling."""

from collections.abc import Collection
from difflib import get_close_matches

TRL_VERL_ALIASES = {
    "num_generations": "algorithm.group_size",
    "rollout.n": "algorithm.group_size",
    "num_iterations": "algorithm.n_epochs",
    "ppo_epochs": "algorithm.n_epochs",
    "max_steps": "algorithm.n_iterations",
    "total_training_steps": "algorithm.n_iterations",
    "gradient_accumulation_steps": "algorithm.n_micro_batches",
    "train_batch_size": "rollout.n_prompts",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "beta": "algorithm.kl.weight",
    "kl_coef": "algorithm.kl.weight",
}
"""Names of TRL and verl, by their ends, and what does the same here; README says what counts otherwise."""


def closest(key: str, known: Collection[str]) -> str | None:
    """The known key that was meant, if any; never one that the given key lies below."""
    names = key.split(".")
    ends = [".".join(names[start:]) for start in range(len(names))]
    own = [one for one in known if "." not in key and one.endswith(f".{key}")]
    meant = [TRL_VERL_ALIASES[end] for end in ends if end in TRL_VERL_ALIASES]
    # A group may have the setting for itself, as sft its optimizer.
    for candidate in (*(f"{names[0]}.{one}" for one in meant), *(own if len(own) == 1 else ()), *meant):
        if candidate in known and candidate != key:
            return candidate
    others = sorted(one for one in known if not key.startswith(f"{one}."))
    return next(iter(get_close_matches(key, others, n=1)), None)
