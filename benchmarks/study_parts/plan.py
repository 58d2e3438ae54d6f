"""What the study runs: arms, tasks and blocks, each run a list of Hydra overrides."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

ARMS = {
    "dense": ("experiment=dense",),
    "naive": ("experiment=naive",),
    "tis": ("experiment=tis",),
    "mis": ("experiment=mis",),
    "sparse_rl": ("experiment=sparse_rl",),
    "shadow": ("experiment=shadow",),
    "smd": ("experiment=smd", "distillation.anchor_weight=0"),
    "smd_dense": ("experiment=smd", "distillation=dense_student"),
    "smd_current": ("experiment=smd", "distillation.anchor_weight=0", "distillation.teacher=policy"),
    "distill": ("experiment=smd", "distillation.anchor_weight=0", "algorithm.policy_weight=0"),
}
"""Without a KL to the frozen model on dense contexts; `anchored` adds the same one to each."""

MAIN_ARMS = ("dense", "naive", "tis", "mis", "sparse_rl", "shadow", "smd", "smd_dense")
ANCHOR_WEIGHT = 1.0
"""Of KL(sg π_reference ‖ π) on dense contexts in every anchored arm, as much as the distillation weighs."""

TASKS = {
    "chain_sum": ("task=chain_sum", "rollout.max_new_tokens=24"),
    "recall": ("task=recall", "sft.n_steps=400"),
    "long_chain": ("task=chain_sum", "task.n_terms=8", "rollout.max_new_tokens=40"),
}
"""Arithmetic with a scratchpad; recall; a long chain, which the warm model gets wrong with all keys, too."""

MAIN_TASK, MAIN_POLICY = "chain_sum", "random"
BUDGETS = {"chain_sum": 16, "recall": 32, "long_chain": 28}
LEARNING_RATES = (3e-4, 1e-3, 3e-3)
TASK_RATE = 1e-3
"""Of every arm on the other tasks. On the main one it left each anchored arm within 3 points of its best."""
TUNING_SEED = 100
SEEDS, FEW_SEEDS = (0, 1, 2, 3, 4), (0, 1, 2)
N_ITERATIONS = 100
COMMON = (
    "diagnostics=none",
    "evaluation.n_prompts=1024",
    "evaluation.budgets=[]",
    "callbacks.checkpoint_every=100000",
)


@dataclass(frozen=True)
class Setting:
    """One run of the study."""

    arm: str
    anchored: bool
    seed: int
    lr: float
    task: str = MAIN_TASK
    policy: str = MAIN_POLICY
    budget: int = BUDGETS[MAIN_TASK]
    n_iterations: int = N_ITERATIONS

    @property
    def name(self) -> str:
        """Of the arm, as tables call it."""
        return f"{self.arm}+anchor" if self.anchored else self.arm

    @property
    def folder(self) -> str:
        """Of its files."""
        cache = f"{self.policy}-{self.budget}"
        return f"{self.task}-{cache}-{self.name}-{self.lr}-{self.n_iterations}-{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """What fit is told."""
        return [
            *ARMS[self.arm],
            *self._anchor(),
            *TASKS[self.task],
            f"cache.policy={self.policy}",
            f"cache.budget={self.budget}",
            f"optimizer.lr={self.lr}",
            f"algorithm.n_iterations={self.n_iterations}",
            f"seed={self.seed}",
            *COMMON,
        ]

    def _anchor(self) -> list[str]:
        if not self.anchored:
            return []
        has_distillation = "experiment=smd" in ARMS[self.arm]
        chosen = [] if has_distillation else ["distillation=anchor"]
        return [*chosen, f"distillation.anchor_weight={ANCHOR_WEIGHT}"]


Rates = Callable[[str, bool], float]
"""The learning rate of an arm, as the block `rates` found it."""


def rates() -> list[Setting]:
    """A learning rate for each arm, by one seed that is used for nothing else."""
    return [
        Setting(arm, anchored, TUNING_SEED, lr)
        for arm in MAIN_ARMS
        for anchored in (False, True)
        for lr in LEARNING_RATES
    ]


def main(rate: Rates) -> list[Setting]:
    """Every arm, with and without the anchor."""
    return _grid(rate, [(arm, anchored) for anchored in (True, False) for arm in MAIN_ARMS], SEEDS)


def controls(rate: Rates) -> list[Setting]:
    """Distillation without the policy gradient; the current policy as the teacher."""
    pairs = [(arm, anchored) for arm in ("distill", "smd_current") for anchored in (True, False)]
    return _grid(rate, pairs, SEEDS)


SHORT = (("naive", True), ("tis", True), ("shadow", True), ("smd", True), ("dense", True))
"""The arms of the smaller comparisons."""


def budgets(rate: Rates) -> list[Setting]:
    """A tighter and a wider cache."""
    runs = [run for run in _grid(rate, SHORT, FEW_SEEDS) if run.arm != "dense"]
    return [replace(run, budget=budget) for budget in (12, 20) for run in runs]


def tasks(_: Rates) -> list[Setting]:
    """The other tasks, all arms at one learning rate."""
    return [
        replace(run, task=task, budget=BUDGETS[task])
        for task in TASKS
        if task != MAIN_TASK
        for run in _grid(lambda *_: TASK_RATE, (*SHORT, ("distill", True)), FEW_SEEDS)
    ]


def policies(rate: Rates) -> list[Setting]:
    """Published eviction policies instead of random eviction."""
    runs = [run for run in _grid(rate, SHORT, FEW_SEEDS) if run.arm != "dense"]
    return [replace(run, policy=policy) for policy in ("snapkv", "streaming") for run in runs]


TIMED_ITERATIONS = 10


def timing(rate: Rates) -> list[Setting]:
    """What an iteration costs; to be run with one job on a machine that does nothing else."""
    runs = _grid(rate, [(arm, anchored) for anchored in (True, False) for arm in MAIN_ARMS], SEEDS[:1])
    return [replace(run, n_iterations=TIMED_ITERATIONS) for run in runs]


def clock(rate: Rates, seconds: Callable[[str, bool], float]) -> list[Setting]:
    """The cheaper arms for as long as smd with its anchor takes; `seconds` of an iteration of an arm."""
    allowed = N_ITERATIONS * seconds("smd", True)
    return [
        replace(run, n_iterations=round(allowed / seconds(run.arm, run.anchored)))
        for run in _grid(rate, [("naive", True), ("tis", True), ("shadow", True)], FEW_SEEDS)
    ]


def _grid(rate: Rates, arms: Iterable[tuple[str, bool]], seeds: Sequence[int]) -> list[Setting]:
    """Seed by seed, so that a study cut short has whole seeds. Arms that were not tuned get smd's rate."""
    rates = {(arm, anchored): rate(arm if arm in MAIN_ARMS else "smd", anchored) for arm, anchored in arms}
    return [Setting(*chosen, seed, rates[chosen]) for seed in seeds for chosen in rates]


BLOCKS: dict[str, Callable[[Rates], list[Setting]]] = {
    "main": main,
    "controls": controls,
    "budgets": budgets,
    "tasks": tasks,
    "policies": policies,
    "timing": timing,
}
"""In the order in which they are run; `rates` comes before them, `clock` after `timing`."""
