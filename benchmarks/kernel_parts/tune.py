"""Other tiles, warps and stages for the kernels than they have: timed in turns, and nothing is changed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

from kernel_parts.accuracy import WrongKernelError
from kernel_parts.case import Builder, Case, Setting
from kernel_parts.timing import Spread, first_seconds, spread, taking_turns
from text_table import text_table
from time_limit import TimeLimit
from torch import Tensor

from lit_rlkv.kernels.decode_attention import kernel as decode_kernel
from lit_rlkv.kernels.shadow_attention import launch as shadow_launch
from lit_rlkv.kernels.shadow_attention.tiles import Tiles, TilesOfPasses
from lit_rlkv.kernels.token_logps import kernel as logits_kernel

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Candidate:
    """A configuration: values that stand in for attributes of a kernel's module."""

    name: str
    module: ModuleType
    values: dict[str, Any]

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = {name: getattr(self.module, name) for name in self.values}
        try:
            for name, value in self.values.items():
                setattr(self.module, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self.module, name, value)


@dataclass(frozen=True)
class Tuned:
    """Seconds of one operation's configurations, and why the others are out."""

    op: str
    label: str
    way: str
    device_type: str
    seconds: dict[str, Spread]
    problems: dict[str, str]

    def row(self) -> dict[str, Any]:
        """Return the row of the record, with the fastest configuration and its time over today's."""
        fastest = min(self.seconds, key=lambda name: self.seconds[name].median)
        over = self.seconds[fastest].median / self.seconds[AS_IT_IS].median
        return {**asdict(self), "fastest": fastest, "fastest_over_as_it_is": over}

    def __str__(self) -> str:
        notes = [f"  {name}: {why}" for name, why in self.problems.items()]
        return "\n".join([f"{self.op}, {self.label}: {self.way}", _table(self.seconds), *notes])


def tune(op: str, label: str, build: Builder, setting: Setting, limit: TimeLimit) -> Tuned:
    """Time every candidate at the case's size; past the limit no more are tried."""
    case = build()
    usable, problems = [], {}
    for candidate in CANDIDATES[op]():
        problem = "no time left" if limit.is_over else find_problem(case, candidate, setting)
        if problem is None:
            usable.append(candidate)
        else:
            problems[candidate.name] = problem
    calls = {AS_IT_IS: case.arms[0].call} | {c.name: _under(c, case) for c in usable}
    times = taking_turns(calls, setting.device, setting.n_rounds, prepare=case.prepare)
    found = {name: spread(values) for name, values in times.items()}
    return Tuned(op, label, case.arms[0].name, setting.device, found, problems)


def find_problem(case: Case, candidate: Candidate, setting: Setting) -> str | None:
    """Why a candidate is out, None if it is not: it does not compile or fit, or it is wrong."""
    with candidate.applied():
        try:
            first_seconds(case.arms[0].call, setting.device)
            case.check()
        except WrongKernelError as error:
            return str(error)
        except Exception as error:  # compiler and driver raise what they like; the next candidate may fit
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
    return None


def _under(candidate: Candidate, case: Case) -> Any:
    def call() -> None:
        with candidate.applied():
            case.arms[0].call()

    return call


def _table(found: dict[str, Spread]) -> str:
    base = found[AS_IT_IS].median
    rows = [
        [name, *(f"{1e3 * value:.4f}" for value in (s.median, s.p10, s.p90)), f"{s.median / base:.3f}"]
        for name, s in sorted(found.items(), key=lambda item: item[1].median)
    ]
    return text_table(("configuration", "ms", "p10", "p90", "/ as it is"), rows)


def decode_candidates() -> Iterator[Candidate]:
    """Slots at once, stages and warps, one changed at a time, and programs for each row and head."""
    plan = decode_kernel.plan
    changes: Sequence[dict[str, int]] = [
        *({"block": block} for block in (32, 64, 128)),
        *({"n_stages": n} for n in (2, 3, 5)),
        *({"n_warps": n} for n in (2, 8)),
        {"block": 32, "n_stages": 6},
        {"block": 128, "n_stages": 2, "n_warps": 8},
        *({"n_splits": n} for n in (1, 2, 4, 8)),
    ]
    for change in changes:

        def changed(*arguments: Any, change: dict[str, int] = change) -> Any:
            return replace(plan(*arguments), **change)

        yield Candidate(_described(change), decode_kernel, {"plan": changed})


def shadow_candidates() -> Iterator[Candidate]:
    """Tiles of one pass at a time; the other passes stay as they are."""
    tiles_for = shadow_launch.tiles_for
    tiles = {
        "forward": [(128, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 4, 3), (64, 64, 4, 3)],
        "query_gradients": [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)],
        "key_gradients": [(64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 3), (32, 128, 8, 2), (128, 64, 8, 2)],
    }
    for pass_name, choices in tiles.items():
        for choice in choices:

            def changed(
                like: Tensor, width: int, name: str = pass_name, choice: tuple[int, ...] = choice
            ) -> TilesOfPasses:
                return replace(tiles_for(like, width), **{name: Tiles(*choice)})

            sizes = "{} queries, {} keys, {} warps, {} stages".format(*choice)
            yield Candidate(f"{pass_name}: {sizes}", shadow_launch, {"tiles_for": changed})


def logits_candidates() -> Iterator[Candidate]:
    """Widths of tiles and warps of the row kernels."""
    for change in (
        {"N_WARPS": 4},
        {"N_WARPS": 16},
        {"N_DEEP": 2},
        {"N_DEEP": 8},
        {"N_LANES": 1024},
        {"N_LANES": 4096, "N_WARPS": 16},
        {"BLOCK": 2048},
        {"BLOCK": 8192},
    ):
        yield Candidate(_described(change), logits_kernel, change)


def _described(change: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in change.items())


CANDIDATES = {
    "decode_attention": decode_candidates,
    "shadow_attention": shadow_candidates,
    "token_logps": logits_candidates,
}
"""Operations with a configuration in one place; the others take a small share of a step."""
