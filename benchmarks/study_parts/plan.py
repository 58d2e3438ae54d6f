"""The runs of the study: arms, tasks and blocks; each run is a list of Hydra overrides."""

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
"""Weight of KL(sg π_reference ‖ π) on dense contexts in anchored arms, equal to the distillation's."""

PRODUCTS = (
    "task=products",
    "environment=tools",
    r"environment.pattern='\A(?P<arguments>[0-9]+[*+][0-9]+)\Z'",
    "environment.role=null",
    "rollout.max_new_tokens=80",
    "rollout.max_turns=6",
    "rollout.max_observation_tokens=16",
    "rollout.environment_timeout_s=null",
    "sft.batch_size=64",
    "sft.n_pairs=0",
    "sft.n_steps=400",
    "evaluation.n_prompts=256",
)
"""As in experiment=tools."""
TASKS = {
    "chain_sum": ("task=chain_sum", "rollout.max_new_tokens=24"),
    "recall": ("task=recall", "sft.n_steps=400"),
    "long_chain": ("task=chain_sum", "task.n_terms=8", "rollout.max_new_tokens=40"),
    "half_learned": ("task=chain_sum", "rollout.max_new_tokens=24", "sft.n_steps=150"),
    "products": (*PRODUCTS, "rollout.n_prompts=16"),
    "products_wide": PRODUCTS,
    "smollm2": ("recipe=smollm2", "sft.batch_size=12", "sft.n_pairs=0", "evaluation.n_prompts=256"),
}
"""Arithmetic with a scratchpad; recall; a long chain; the first after so short an SFT stage that the model
with all keys is wrong on about every second problem, which leaves rewards something to teach; sums of
products with a calculator that answers between turns, with 128 and 256 responses an iteration; and the first
with a pretrained model, which `make smollm2` fetches."""

MAIN_TASK, MAIN_POLICY = "chain_sum", "random"
BUDGETS = {
    "chain_sum": 16,
    "recall": 32,
    "long_chain": 28,
    "half_learned": 16,
    "products": 40,
    "products_wide": 40,
    "smollm2": 32,
}
LEARNING_RATES = (3e-4, 1e-3, 3e-3)
COMMON_RATE = 3e-4
"""Of every arm outside of the main comparison. With the tuning seed only here no arm's reward falls far at
first, and each anchored arm ends within 2 points of its best."""
TUNING_SEED = 100
SEEDS, FEW_SEEDS = (0, 1, 2, 3, 4), (0, 1, 2)
CLOCK_SEEDS = (5, 6, 7)
N_ITERATIONS = 100
PRETRAINED_RATE, PRETRAINED_ITERATIONS = 1e-3, 30
"""Learning rate and iterations of recipe=smollm2."""
TOOLS_RATE = 1e-3
"""By one run of shadow with the tuning seed: in 40 iterations of 256 responses its reward rose from 0.36 to
0.69."""
TOOLS_ITERATIONS, MORE_TOOLS_ITERATIONS = 20, 40
RANKED = ("expected", "tova", "snapkv", "rkv", "streaming", "random")
"""Four policies that docs/results/ranking.md has first, and two that look at no score."""
N_RESPONSES = 256
"""Responses of an iteration of the default run."""
OTHER_RESPONSES = {"products": 128, "smollm2": 32}
"""Responses of an iteration of these tasks."""
COMMON = (
    "diagnostics=none",
    "evaluation.n_prompts=1024",
    "evaluation.budgets=[]",
    "callbacks.checkpoint_every=100000",
)


MISMATCH = "{_target_: lit_rlkv.callbacks.mismatch.DenseMismatch, every: 10, n_rows: 64}"
OVERLAP_ITERATIONS, HIGH_RATE = 30, 1e-3
OVERLAP_CACHES = (("random", 14), ("random", 18), ("snapkv", 16), ("snapkv", 18))
MORE_CACHES = (("random", 16), ("snapkv", 17))
"""Policies and budgets; their overlaps lie on both sides of 0.86 at the start."""


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
    anchor_weight: float = ANCHOR_WEIGHT
    measures_overlap: bool = False

    @property
    def name(self) -> str:
        """Name of the arm in tables."""
        return f"{self.arm}+anchor" if self.anchored else self.arm

    @property
    def folder(self) -> str:
        """Name of the run's files."""
        cache = f"{self.policy}-{self.budget}"
        anchor = f"-{self.anchor_weight}" if self.anchored else ""
        return f"{self.task}-{cache}-{self.name}{anchor}-{self.lr}-{self.n_iterations}-{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """Overrides for fit."""
        return [
            *ARMS[self.arm],
            *self._anchor(),
            f"cache.policy={self.policy}",
            f"cache.budget={self.budget}",
            f"optimizer.lr={self.lr}",
            f"algorithm.n_iterations={self.n_iterations}",
            f"seed={self.seed}",
            *COMMON,
            *([f"+diagnostics.mismatch={MISMATCH}"] if self.measures_overlap else []),
            *TASKS[self.task],
        ]

    def _anchor(self) -> list[str]:
        if not self.anchored:
            return []
        has_distillation = "experiment=smd" in ARMS[self.arm]
        chosen = [] if has_distillation else ["distillation=anchor"]
        return [*chosen, f"distillation.anchor_weight={self.anchor_weight}"]


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


SHORT = ("naive", "tis", "shadow", "smd")
"""The arms of the smaller comparisons, at one learning rate and, but for `half_learned`, with the anchor."""


def one_rate(_: Rates) -> list[Setting]:
    """The main comparison with the anchor, all arms at one learning rate; README shows it."""
    return _at_one_rate(("dense", "naive", "tis", "shadow", "smd", "smd_dense", "distill"), SEEDS)


def one_rate_free(_: Rates) -> list[Setting]:
    """The same without the anchor, on one kind of processor; half_learned is compared with it."""
    return [replace(run, anchored=False) for run in _at_one_rate(("tis", "shadow", "smd", "distill"), SEEDS)]


def weak_anchor(_: Rates) -> list[Setting]:
    """An anchor that holds less, which binds those most whose learner sees all keys."""
    return [replace(run, anchor_weight=0.1) for run in _at_one_rate(SHORT, FEW_SEEDS)]


def longer(_: Rates) -> list[Setting]:
    """Three times the iterations."""
    return [replace(run, n_iterations=3 * N_ITERATIONS) for run in _at_one_rate(("shadow", "smd"), FEW_SEEDS)]


def budgets(_: Rates) -> list[Setting]:
    """Tighter caches; one of 18 keys, and room for 5 more, holds all 23 of a problem."""
    return [replace(run, budget=budget) for budget in (12, 14) for run in _at_one_rate(SHORT, FEW_SEEDS)]


def tasks(_: Rates) -> list[Setting]:
    """The other tasks."""
    runs = _at_one_rate(("dense", *SHORT, "distill"), FEW_SEEDS)
    others = ("recall", "long_chain")
    return [replace(run, task=task, budget=BUDGETS[task]) for task in others for run in runs]


def half_learned(_: Rates) -> list[Setting]:
    """Return runs with a frozen model that is often wrong, without the anchor to it."""
    runs = _at_one_rate(("dense", *SHORT, "distill"), SEEDS) + _at_one_rate(("smd_current",), FEW_SEEDS)
    place = {"task": "half_learned", "budget": BUDGETS["half_learned"]}
    return [replace(run, anchored=False, **place) for run in runs]


def policies(_: Rates) -> list[Setting]:
    """Published eviction policies instead of random eviction."""
    runs = _at_one_rate(SHORT, FEW_SEEDS)
    return [replace(run, policy=policy) for policy in ("snapkv", "streaming") for run in runs]


def pretrained(_: Rates) -> list[Setting]:
    """Return runs of a pretrained model, under random eviction and a published policy."""
    runs = _at_one_rate((*SHORT, "distill"), FEW_SEEDS)
    place = {"task": "smollm2", "budget": BUDGETS["smollm2"], "n_iterations": PRETRAINED_ITERATIONS}
    return [
        replace(run, policy=policy, lr=PRETRAINED_RATE, **place)
        for policy in (MAIN_POLICY, "snapkv")
        for run in runs
    ]


def pretrained_policies(_: Rates) -> list[Setting]:
    """GRPO with replay from a pretrained model under `RANKED`, and a control with all keys, seed by seed."""
    place = {"task": "smollm2", "budget": BUDGETS["smollm2"], "n_iterations": PRETRAINED_ITERATIONS}
    return [
        replace(run, policy=policy, lr=PRETRAINED_RATE, **place)
        for run in _at_one_rate(("dense", "shadow"), FEW_SEEDS)
        for policy in (RANKED if run.arm == "shadow" else (MAIN_POLICY,))
    ]


def overlap(_: Rates) -> list[Setting]:
    """Return runs with and without replay over the overlap with the dense policy, and a dense control."""
    return [run for seed in FEW_SEEDS for run in _by_overlap(seed, COMMON_RATE, OVERLAP_CACHES)]


def overlap_more(_: Rates) -> list[Setting]:
    """Return the same with the budgets between those."""
    return [run for seed in FEW_SEEDS for run in _by_overlap(seed, COMMON_RATE, MORE_CACHES)[1:]]


def overlap_high(_: Rates) -> list[Setting]:
    """Return all of these at a rate that lets the reward fall, for one seed."""
    return _by_overlap(0, HIGH_RATE, (*OVERLAP_CACHES, *MORE_CACHES))


def _by_overlap(seed: int, lr: float, caches: Iterable[tuple[str, int]]) -> list[Setting]:
    control = Setting("dense", False, seed, lr, n_iterations=OVERLAP_ITERATIONS, measures_overlap=True)
    pairs = [(arm, policy, budget) for policy, budget in caches for arm in ("naive", "shadow")]
    return [
        control,
        *(replace(control, arm=arm, policy=policy, budget=budget) for arm, policy, budget in pairs),
    ]


def tools(_: Rates) -> list[Setting]:
    """Conversations with a calculator, whose early results are needed late, in a quarter of the responses."""
    return _with_tools("products", TOOLS_ITERATIONS)


def more_tools(_: Rates) -> list[Setting]:
    """The same for as long as experiment=tools."""
    return _with_tools("products_wide", MORE_TOOLS_ITERATIONS)


def _with_tools(task: str, n_iterations: int) -> list[Setting]:
    place = {"task": task, "budget": BUDGETS[task], "n_iterations": n_iterations, "lr": TOOLS_RATE}
    return [replace(run, **place) for run in _at_one_rate(("dense", "naive", "shadow", "smd"), FEW_SEEDS)]


def clock(seconds: Callable[[Setting], float]) -> list[Setting]:
    """The other arms for as long as smd takes; `seconds` of an iteration of a run.

    With seeds of its own, so that all its runs can be made on one machine, whichever made the others.
    """
    long = _at_one_rate(("smd",), CLOCK_SEEDS)
    allowed = N_ITERATIONS * seconds(long[0])
    short = _at_one_rate(("naive", "tis", "shadow"), CLOCK_SEEDS)
    return [*long, *(replace(run, n_iterations=round(allowed / seconds(run))) for run in short)]


def _at_one_rate(arms: Sequence[str], seeds: Sequence[int]) -> list[Setting]:
    return _grid(lambda *_: COMMON_RATE, [(arm, True) for arm in arms], seeds)


def _grid(rate: Rates, arms: Iterable[tuple[str, bool]], seeds: Sequence[int]) -> list[Setting]:
    """Seed by seed, so that a study cut short has whole seeds. Arms that were not tuned get smd's rate."""
    rates = {(arm, anchored): rate(arm if arm in MAIN_ARMS else "smd", anchored) for arm, anchored in arms}
    return [Setting(*chosen, seed, rates[chosen]) for seed in seeds for chosen in rates]


BLOCKS: dict[str, Callable[[Rates], list[Setting]]] = {
    "main": main,
    "controls": controls,
    "one_rate": one_rate,
    "tasks": tasks,
    "half_learned": half_learned,
    "budgets": budgets,
    "policies": policies,
    "one_rate_free": one_rate_free,
    "weak_anchor": weak_anchor,
    "longer": longer,
    "pretrained": pretrained,
    "overlap": overlap,
    "overlap_high": overlap_high,
    "overlap_more": overlap_more,
    "tools": tools,
    "more_tools": more_tools,
    "pretrained_policies": pretrained_policies,
}
"""In the order in which they are run; `rates` comes before them, `clock` after them."""
