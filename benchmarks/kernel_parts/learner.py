"""The run behind learner.py: a model and rollouts, both kernels compared, then all views timed in turns."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product

import record
import torch
from kernel_parts.accuracy import require_accurate
from kernel_parts.case import Arm, Case, CaseResult, Setting, measure_all
from kernel_parts.evictions import Schedule, simulate_evictions
from kernel_parts.table import mb
from kernel_parts.timing import Ceilings, synchronize
from text_table import text_table
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kernels.shadow_attention import use_shadow_attention
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.models.compiled_layers import CompiledLayers
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.models.replay import response_logps
from lit_rlkv.types import Record, Rollout

NAME = "learner"
CHECK_LEN = {"cpu": 96, "cuda": 2048}
"""Longest sequence at which the two kernels are compared."""
MAX_REFERENCE_LEN = 8192
"""Longest sequence whose mask of [seq, seq] for each head the definition is timed with."""
NO_CEILING = Ceilings(copy_gb_per_s=float("inf"), matmul_tflops=float("inf"))

ADAPTERS = {"rank": 32, "alpha": 64, "target_modules": "all-linear"}
NEED_PEFT = {"frozen", "checkpoints", "host"}
"""Levers that need a package which a lent machine may lack."""
N_LISTED = 25
"""Operations of a profile."""

Logps = Callable[[PreTrainedModel, Rollout], Tensor]
Values = tuple[Tensor, ...]


@dataclass(frozen=True)
class Shape:
    """Settings that all steps of a run share."""

    sizes: dict[str, int]
    batch: int
    interval: int
    prompt: int


def run(args: argparse.Namespace, sizes: dict[str, int]) -> list[CaseResult]:
    """Length by length, all budgets of a length in turns with the dense views.

    Raises:
        SystemExit: the kernels were refused at some lengths; the others have been measured.
    """
    sizes = sizes | ({"num_hidden_layers": args.layers} if args.layers else {})
    shape = Shape(sizes, args.batch, args.interval, args.prompt)
    setting = Setting(args.device, args.device == "cpu", args.rounds)
    can_run = [levers for levers in args.levers if find_spec("peft") or not NEED_PEFT & {*levers}]
    for levers in args.levers:
        if levers not in can_run:
            print(f"{'+'.join(levers)}: left out, for there is no package peft", flush=True)
    learners = [Learner(setting, shape, max(args.lengths), levers) for levers in can_run]
    if not learners:
        return []
    if args.profile:
        profile(args, setting, shape, learners)
        return []
    described = {"budgets": args.budgets, "dtype": _precision(setting), **asdict(shape)}
    described |= {"levers": can_run, "skip_dense": args.skip_dense}
    todo = (
        (
            f"{length} tokens",
            {"asked": {"tokens": length} | described},
            partial(make_case, setting, learners, shape, length, args.budgets, has_dense=not args.skip_dense),
        )
        for length in args.lengths
    )
    results, refused = measure_all(
        args, NAME, todo, setting, NO_CEILING, partial(record_row, setting=setting)
    )
    if results:
        print("\n" + report(results, setting, shape))
    if refused:
        sys.exit("\n".join(refused))
    return results


def make_model(setting: Setting, shape: Shape, max_len: int) -> PreTrainedModel:
    """Random weights, the same at every call."""
    sizes = dict(shape.sizes)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = tiny_qwen3(sizes.pop("vocab_size"), 0, 1, max_position_embeddings=max_len, **sizes)
    return prepare_backbone(model.type(setting.dtype).train())


class Learner:
    """A model and the levers of its steps; it can be made from the model of another.

    Args:
        levers: some of `frozen`, `compiled`, `checkpoints`, `host`.
    """

    def __init__(self, setting: Setting, shape: Shape, max_len: int, levers: Sequence[str] = ()) -> None:
        self.levers, self.model = levers, make_model(setting, shape, max_len)
        self._blocks: list[Callable[[], AbstractContextManager[object]]] = []
        if "frozen" in levers:
            from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter

            self.model.requires_grad_(False)
            add_adapter(self.model, "policy", LoraSpec(**ADAPTERS))
            self._blocks.append(partial(use_adapter, lora_layers(self.model), "policy"))
        if NEED_PEFT & {*levers}:
            from lit_rlkv.models.activations import checkpoint_layers, checkpointing

            checkpoints = "host" if "host" in levers else "checkpoints" in levers
            checkpoint_layers(self.model, checkpoints)
            self._blocks.append(partial(checkpointing, self.model, checkpoints))
        if "compiled" in levers:
            compiled = CompiledLayers(self.model)
            self._blocks.append(lambda: compiled)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def prefix(self) -> str:
        """The beginning of the names of its views."""
        return f"{'+'.join(self.levers)}: " if self.levers else ""

    def step(self, logps: Logps, rollout: Rollout, kernels: str) -> Values:
        """Return log-probs of the actions and the gradients of their sum, which are left nowhere."""
        with ExitStack() as stack, computing_by(kernels):
            for block in self._blocks:
                stack.enter_context(block())
            out = logps(self.model, rollout)
            return out.detach(), *torch.autograd.grad(out.sum(), self.trained)


def make_rollout(setting: Setting, shape: Shape, length: int, budget: int) -> Rollout:
    """Random tokens with the evictions of a simulated h2o; nothing is padding."""
    lead = (shape.batch, shape.sizes["num_hidden_layers"], shape.sizes["num_key_value_heads"])
    window = min(32, budget // 4)
    schedule = Schedule(budget, shape.interval, window=window, prompt=shape.prompt)
    draw = torch.Generator().manual_seed(0)
    input_ids = torch.randint(2, shape.sizes["vocab_size"], (shape.batch, length), generator=draw)
    response_mask = (torch.arange(length) >= shape.prompt).expand(shape.batch, -1)
    rollout = Rollout(
        input_ids=input_ids,
        attention_mask=torch.ones_like(response_mask),
        response_mask=response_mask,
        rollout_logps=torch.zeros(shape.batch, length),
        record=Record(simulate_evictions(lead, length, schedule)),
        kv_bytes=0,
    )
    return rollout.to(setting.device)


@contextmanager
def computing_by(kernels: str) -> Iterator[None]:
    """Choose kernels within a `with` block; `segments`: those of shadow attention, beside Triton's."""
    is_segmented = kernels == "segments"
    with (
        use_kernels("auto" if is_segmented else kernels),
        use_shadow_attention("segments" if is_segmented else "lists"),
    ):
        yield


def step(model: PreTrainedModel, logps: Logps, rollout: Rollout, kernels: str) -> Values:
    """Log-probs of the actions and the gradients of their sum with respect to all weights."""
    with computing_by(kernels):
        out = logps(model, rollout)
        return out, *torch.autograd.grad(out.sum(), list(model.parameters()))


def torch_logps(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Return log-probs as a dense learner does: transformers' causal attention, by SDPA without a mask."""
    hidden = model.base_model(input_ids=rollout.input_ids[:, :-1], use_cache=False).last_hidden_state
    return response_logps(model, rollout, hidden[rollout.response_mask[:, 1:]], 1.0)


dense_logps = partial(replay_logps, shadow=False)
shadow_logps = partial(replay_logps, shadow=True)


def make_case(
    setting: Setting,
    learners: Sequence[Learner],
    shape: Shape,
    length: int,
    budgets: Sequence[int],
    *,
    has_dense: bool = True,
) -> Case:
    """All views of one length with each choice of levers; ours is the shadow view of the smallest budget."""
    checked = make_model(setting, shape, length)
    return Case(
        op="learner",
        label=f"{length} tokens",
        sizes={"seq": length, "batch": shape.batch, "interval": shape.interval, **shape.sizes},
        arms=tuple(
            Arm(learner.prefix + name, partial(learner.step, logps, rollout, kernels))
            for learner in learners
            for name, logps, rollout, kernels in views(setting, shape, length, budgets, has_dense=has_dense)
        ),
        check=partial(check, setting, checked, shape, min(length, CHECK_LEN[setting.device]), min(budgets)),
        bound="none",
        inputs=tuple(parameter for learner in learners for parameter in learner.model.parameters()),
    )


def views(
    setting: Setting, shape: Shape, length: int, budgets: Sequence[int], *, has_dense: bool
) -> Iterator[tuple[str, Logps, Rollout, str]]:
    """Yield name, log-probs, rollout and kernels of each view."""
    rollouts = {budget: make_rollout(setting, shape, length, budget) for budget in sorted(budgets)}
    first = next(iter(rollouts.values()))
    found = [(f"shadow {budget}", shadow_logps, rollout) for budget, rollout in rollouts.items()]
    found += [("dense", dense_logps, first)] if has_dense else []
    for kernels in dict.fromkeys((setting.timed_kernels, "reference")):
        if kernels == "triton" or length <= MAX_REFERENCE_LEN:
            yield from ((f"{name}, {kernels}", logps, rollout, kernels) for name, logps, rollout in found)
    yield from ((f"{name}, segments", logps, rollout, "segments") for name, logps, rollout in found)
    if has_dense:
        yield "torch dense", torch_logps, first, setting.timed_kernels


def profile(args: argparse.Namespace, setting: Setting, shape: Shape, learners: Sequence[Learner]) -> None:
    """Print and record the operations that take most of a step's time on the device."""
    is_cuda = setting.device == "cuda"
    by = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    for length, learner in product(args.lengths, learners):
        for name, logps, rollout, kernels in views(
            setting, shape, length, args.budgets, has_dense=not args.skip_dense
        ):
            if kernels not in (setting.timed_kernels, "segments"):
                continue
            for _ in range(2):
                learner.step(logps, rollout, kernels)
            with torch.profiler.profile() as found:
                learner.step(logps, rollout, kernels)
                synchronize(setting.device)
            events = sorted(found.key_averages(), key=lambda event: -getattr(event, by))[:N_LISTED]
            rows = [{"name": e.key[:80], "ms": getattr(e, by) / 1e3, "calls": e.count} for e in events]
            title = f"{length} tokens, {learner.prefix}{name}"
            cells = [[row["name"], f"{row['ms']:.2f}", str(row["calls"])] for row in rows]
            print(f"\n{title}\n{text_table(('operation', 'ms', 'calls'), cells)}", flush=True)
            record.append("profile", {"view": title, "operations": rows})


def check(
    setting: Setting,
    model: PreTrainedModel,
    shape: Shape,
    length: int,
    budget: int,
    ours: Callable[..., Values] = step,
) -> float:
    """Errors of Triton's kernels over those of the definitions, both from the definitions one precision up.

    At a length that these can take, under a budget that evicts there, in the dense and in the shadow view.
    """
    budget = min(budget, length // 3)
    rollout = make_rollout(setting, shape, length, budget)
    precise = deepcopy(model).to(torch.float32 if setting.dtype == torch.bfloat16 else torch.float64)
    errors = []
    for view, logps in (("shadow", shadow_logps), ("dense", dense_logps)):
        actual = ours(model, logps, rollout, "triton")
        plain = step(model, logps, rollout, "reference")
        truth = step(precise, logps, rollout, "reference")
        errors_of = [_relative_errors(values[1:], truth[1:]) for values in (actual, plain, truth)]
        results = {
            "log-probs": (actual[0], plain[0], truth[0]),
            "relative error of the gradients": tuple(errors_of),
        }
        errors.append(require_accurate(f"learner, {view} view, {length} tokens", results))
    return max(errors)


def _relative_errors(gradients: Values, truth: Values) -> Tensor:
    """‖g − truth‖ / ‖truth‖ of each parameter."""
    pairs = zip(gradients, truth, strict=True)
    return torch.stack([(g.double() - t.double()).norm() / t.double().norm() for g, t in pairs])


def report(results: Sequence[CaseResult], setting: Setting, shape: Shape) -> str:
    """A line for each view of each length."""
    headings = ("tokens", "view", "s", "p10", "p90", "tokens/s", "/ torch dense", "first step s", "peak MB")
    rows, notes = [], []
    for result in results:
        by_name = {arm.name: arm for arm in result.arms}
        for number, arm in enumerate(result.arms):
            dense = by_name.get("".join(arm.name.rpartition(": ")[:2]) + "torch dense")
            s, n_tokens = arm.seconds, shape.batch * int(result.sizes["seq"])
            cells = [f"{value:.4f}" for value in (s.median, s.p10, s.p90)]
            ratio = "" if dense is None else f"{s.median / dense.seconds.median:.2f}"
            costs = [f"{n_tokens / s.median:,.0f}", ratio, f"{arm.first_s:.2f}", mb(arm.peak_bytes)]
            rows.append([result.sizes["seq"] if number == 0 else "", arm.name, *cells, *costs])
        notes.extend(
            f"  {result.label}: {failed.name} cannot run: {failed.reason}" for failed in result.failed
        )
    worst = max(result.excess_error for result in results)
    lines = [
        f"{record.provenance()['device']}, {_precision(setting)}, {shape.sizes['num_hidden_layers']} layers, "
        f"batch {shape.batch}; largest error of Triton's kernels {worst:.2f} times that of the definitions",
    ]
    if setting.timed_kernels != "triton":
        lines.append("No GPU: Triton's kernels were interpreted, found right and not timed.")
    table = text_table(headings, [[str(cell) for cell in row] for row in rows], n_left=2)
    return "\n".join([*lines, table, *notes])


def record_row(result: CaseResult, setting: Setting) -> dict:
    """One line of the record."""
    out_of_memory = any(failed.out_of_memory for failed in result.failed)
    return {**asdict(result), "n_rounds": setting.n_rounds, "out_of_memory": out_of_memory}


def _precision(setting: Setting) -> str:
    return str(setting.dtype).removeprefix("torch.")
