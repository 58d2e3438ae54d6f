"""Settings of the runs that are compared between one process and two, and what such runs leave."""

import csv

from safetensors.torch import load_file

from lit_rlkv.callbacks.hooks import RLCallback

SETTINGS = [
    "stages=[sft,rl]",
    "reward=mixed",  # this model is seldom right, and groups that agree on that teach nothing
    "sft.n_steps=100",
    "sft.optimizer.lr=0.01",
    "rollout.n_prompts=8",
    "algorithm.n_iterations=3",
    "fabric.precision=64-true",
    "callbacks.samples_every=9",
    "diagnostics=none",
]
RESAMPLED = [
    *("stages=[rl]", "rollout.n_shards=6", "rollout.n_prompts=12", "algorithm.group_size=2"),
    *("task=jsonl", "task.path=tests/data/sums.jsonl", "~task.n_terms", "algorithm.curriculum.decay=0.5"),
    *("algorithm.resample=2", "algorithm.n_minibatches=2", "algorithm.kl.weight=0.1"),
    *("reward=python", "reward.functions.custom.path=tests/data/rewards.py:has_one"),
    *("+diagnostics.mismatch={_target_:lit_rlkv.callbacks.mismatch.DenseMismatch,n_rows:5}",),
    *("cache.target_overlap=0.9", "cache.budget_bounds=[5,12]", "fabric.tokens_per_pass=48"),
    "+user_callbacks.lengths._target_=tests.distributed.rank_runs.Lengths",
]
"""A run in which ranks agree on prompts, groups, rewards, the budget, and on which metrics there are."""
SYNC = ["roles=full", "algorithm.kl.weight=0.1", "algorithm.reference_sync.every=2"]
"""A run whose reference follows the policy."""
OWN = ("time/", "tokens_per_second", "kv/bytes", "kv/attention", "kv/needs_dead_key", "kv/dead_key_on_top")
"""Metrics of the processes themselves, which are not compared; nor are standard errors, `_se`."""


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0].pop("rewards/accuracies", None)  # before the first update, the signs of float errors
    return [
        {k: float(v) for k, v in row.items() if v and not k.startswith(OWN) and not k.endswith("_se")}
        for row in rows
    ]


def weights_of(folder):
    """Return all weights of the last checkpoint, those of a synced reference among them."""
    files = sorted((folder / "checkpoints" / "iteration-000003").glob("*.safetensors"))
    return {f"{file.stem}.{name}": value for file in files for name, value in load_file(file).items()}


class Lengths(RLCallback):
    """Reports the tokens in responses of each length, of which a step on one rank has only some."""

    def loss_terms(self, module, batch, outputs):
        lengths = batch.rollout.response_mask.sum(dim=1)
        shares = {n: n * (lengths == n).sum() / batch.n_response_tokens for n in {*lengths.tolist()}}
        return {}, {f"lengths/{n}": share for n, share in shares.items()}
