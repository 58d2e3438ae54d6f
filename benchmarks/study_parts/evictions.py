"""The block `evictions`: a policy of evictions that RL trains, against published ones in as many bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from study_parts.analysis import Row, gained, mean_sd
from study_parts.plan import BUDGETS, COMMON_RATE, FEW_SEEDS, TASKS, Setting

from lit_rlkv.reporting.tables import markdown_table

N_ITERATIONS = 30
N_ENDS = 5
"""Iterations at both ends whose mean reward is shown."""
BUDGET = BUDGETS | {"recall": 36}
"""On recall a protected prompt must fit into as many slots, with room for something to choose."""
PROMPT = {"chain_sum": 10, "recall": 30}
"""Tokens of a prompt: the budget of a cache that protects it counts only what comes after."""


@dataclass(frozen=True)
class EvictionSetting(Setting):
    """One run of the block: replay, without distillation or anchor."""

    kind: str = ""
    """Name of the arm in the table: the evictions, and what is trained."""

    @property
    def name(self) -> str:
        return self.kind

    @property
    def folder(self) -> str:
        kind = self.kind.replace(",", "").replace(" ", "_")
        return f"evictions-{self.task}-{kind}-{self.n_iterations}-{self.seed}"

    @property
    def overrides(self) -> list[str]:
        protects = ["cache.protect_prompt=true"] if self.kind == PROTECTED else []
        alone = ["algorithm.policy_weight=0"] if self.kind == ALONE else []
        draws = ["+cache.policy_options.samples=true"] if self.kind in DRAWN else []
        one_start = ["sft.seed=0"] if self.task == "recall" else []
        return [*super().overrides, *protects, *alone, *draws, *one_start]


LEARNED, ALONE, HIGHEST = "learned", "learned, alone", "learned, highest kept"
PROTECTED = "random after the prompt"
DRAWN = (LEARNED, ALONE)
"""Kinds whose evaluations draw the survivors as rollouts do; HIGHEST differs from LEARNED in that alone."""
KINDS = {
    LEARNED: "learned",
    ALONE: "learned",
    HIGHEST: "learned",
    "random": "random",
    "snapkv": "snapkv",
    PROTECTED: "random",
}
"""The eviction policy of each kind of run; in ALONE the policy of the tokens stays as it is."""


def evictions() -> list[EvictionSetting]:
    """Return all runs, seed by seed; on recall all seeds start from one SFT model, which takes long."""
    return [
        EvictionSetting(
            arm="shadow",
            anchored=False,
            seed=seed,
            lr=COMMON_RATE,
            task=task,
            policy=policy,
            budget=BUDGET[task] - (PROMPT[task] if kind == PROTECTED else 0),
            n_iterations=N_ITERATIONS,
            kind=kind,
        )
        for seed in FEW_SEEDS
        for task in PROMPT
        for kind, policy in KINDS.items()
        if task != "recall" or kind not in (ALONE, HIGHEST)
    ]


def eviction_table(rows: Sequence[Row]) -> str:
    """Accuracy under the budget and rewards of the rollouts, in percent, by task and kind."""
    headings = ["task", "evictions", "seeds", "KV, MiB", "before", "after", "gained", "all keys after"]
    headings += ["first rewards", "last rewards"]
    body = []
    for task in TASKS:
        for kind in KINDS:
            if mine := [row for row in rows if (row["task"], row["kind"]) == (task, kind)]:
                before, after, dense = (
                    [row[cell] for row in mine]
                    for cell in ("sparse_accuracy_before", "sparse_accuracy_after", "dense_accuracy_after")
                )
                gains = [gained(row, "sparse") for row in mine]
                columns = (before, after, gains, dense, *_ends(mine))
                body.append(
                    [
                        task,
                        kind,
                        str(len(mine)),
                        f"{mean(row['train_kv_bytes'] for row in mine) / 2**20:.1f}",
                        *map(mean_sd, columns),
                    ]
                )
    return markdown_table(headings, body)


def _ends(rows: Iterable[Mapping[str, list[float]]]) -> list[list[float]]:
    """Return the mean rewards of the first and of the last iterations, of each row."""
    rewards = [row["rewards"] for row in rows]
    return [[mean(r[:N_ENDS]) for r in rewards], [mean(r[-N_ENDS:]) for r in rewards]]
