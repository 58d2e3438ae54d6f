"""Sizes of the pretrained benchmark, and the cells that it measures."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policies import UNTRAINED

NAME = "pretrained"
DENSE = "dense"
KINDS = ("recall", "few_shot", "chat")
SINK, WINDOW = 4, 8


@dataclass(frozen=True)
class Sizes:
    """Everything that decides how long a run takes."""

    budgets: tuple[int, ...] = (32, 64, 128, 256)
    policies: tuple[str, ...] = UNTRAINED
    profiled: tuple[str, ...] = ("snapkv+pyramid",)
    """Policies with a budget profile, for short answers under the two smallest budgets."""
    prompts: tuple[int, ...] = (16, 16, 8)
    """Prompts of a chunk, for each of `KINDS`."""
    answer_tokens: int = 16
    turn_tokens: int = 64
    """Most tokens of the reply in a chat that is measured."""
    history_tokens: int = 96
    """Most tokens of the replies before it."""
    long: tuple[int, int, int] = (8, 1024, 64)
    """Rows, tokens and budget of the rollouts in float32."""
    bf16: tuple[int, int, int] = (4, 128, 64)
    """Rows, tokens and budget of the rollouts in bfloat16."""


FULL = Sizes()
FAST = Sizes(
    budgets=(64,),
    policies=("streaming", "h2o"),
    profiled=(),
    prompts=(2, 2, 1),
    answer_tokens=8,
    turn_tokens=24,
    history_tokens=24,
    long=(2, 96, 64),
    bf16=(2, 64, 32),
)


@dataclass(frozen=True)
class Cell:
    """One measurement; `block` is one of `KINDS`, or long, bf16."""

    block: str
    policy: str
    budget: int | None
    chunk: int = 0
    rows: int = 0
    tokens: int = 0

    @property
    def cache(self) -> CacheSpec:
        """The cache of this cell."""
        if self.budget is None:
            return CacheSpec.dense()
        policy, _, profile = self.policy.partition("+")
        interval = max(self.budget // 4, 1)
        return CacheSpec(policy, self.budget, interval, SINK, WINDOW, budget_profile=profile or None)

    def described(self, model: str) -> dict:
        """Return what identifies this cell in the record."""
        return {"model": model, **asdict(self), "sink": SINK, "window": WINDOW}


def cells(sizes: Sizes, n_chunks: int) -> Iterator[Cell]:
    """Return every cell, the first chunk of all prompts before the rollouts, further chunks after them."""
    yield from chunk_cells(sizes, 0)
    for block in ("bf16", "long"):
        rows, tokens, budget = getattr(sizes, block)
        for policy in (*sizes.policies, DENSE):
            yield Cell(block, policy, None if policy == DENSE else budget, 0, rows, tokens)
    for kind, rows in zip(KINDS[:2], sizes.prompts, strict=False):
        for budget in sizes.budgets[:2]:
            for policy in sizes.profiled:
                yield Cell(kind, policy, budget, 0, rows, sizes.answer_tokens)
    for chunk in range(1, n_chunks):
        yield from chunk_cells(sizes, chunk)


def chunk_cells(sizes: Sizes, chunk: int) -> Iterator[Cell]:
    """Return the cells of one chunk of prompts."""
    for kind, rows in zip(KINDS, sizes.prompts, strict=True):
        tokens = sizes.turn_tokens if kind == "chat" else sizes.answer_tokens
        if kind == "chat" and chunk * rows >= N_CHATS:
            continue
        yield Cell(kind, DENSE, None, chunk, rows, tokens)
        for budget in sizes.budgets:
            for policy in sizes.policies:
                yield Cell(kind, policy, budget, chunk, rows, tokens)


N_CHATS = 16
"""Chats that there are prompts for."""
