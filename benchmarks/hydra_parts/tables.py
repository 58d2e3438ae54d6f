"""Tables of the measurements, beside those of Hydra-RLHF (arXiv:2309.00754)."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_parts.measure import Held
from hydra_parts.runs import SFT
from hydra_parts.timing import Seconds
from memory_model import LLAMA_7B, Job, saved_bytes_per_token, static_bytes, variant_of
from text_table import text_table

from lit_rlkv.models.layouts import LAYOUTS

BASELINE = "lora_ppo"
MB, GB = 1e6, 1e9
PAPER_GB = {"ppo": 220.0, "lora_ppo": 68.0, "j_hydra": 67.9, "hydra": 71.1}
"""Llama-7B, that of ppo an estimate; at different batches."""
PAPER_SECONDS = {"lora_ppo": 18.75, "j_hydra": 5.01, "hydra": 6.47}
PAPER_RANK = 128
ASSUMED_LEN = 1024
"""Tokens per sequence of Llama-7B: our choice, on which what a token costs depends a little."""


@dataclass(frozen=True)
class Result:
    """Measurements of a variant."""

    variant: str
    batch: int
    held: Held
    predicted: dict[str, int]
    seconds: Seconds
    largest_batch: int | None = None
    """Under the limit, 0 if none fits; None where it was not looked for."""
    peak_at_largest: int | None = None
    seconds_at_largest: Seconds | None = None

    @property
    def errors(self) -> tuple[float, float]:
        """Return the ratio to the predicted peak, and to its part that is not resident."""
        peak, resident = self.held.peak, self.held.resident
        predicted = max(self.predicted.values())
        return predicted / peak - 1, (predicted - resident) / (peak - resident) - 1


def mb(n_bytes: float) -> str:
    return f"{n_bytes / MB:,.1f}"


def memory_table(results: Sequence[Result]) -> str:
    headings = ["MB", "weights", "adapters", "heads", "Adam", "gradients", "KV"]
    headings += ["sampling", "scoring", "update", "predicted", "error", "of the rest", "s/sample", "rollout"]
    rows = []
    for result in results:
        held, seconds = result.held, result.seconds
        kinds = (held.weights, held.adapters, held.heads, held.optimizer, held.gradients, held.kv)
        phases = [held.phases.get(name) for name in ("sampling", "scoring", "update")]
        rows.append(
            [
                result.variant,
                *map(mb, kinds),
                *("–" if phase is None else mb(phase.peak_bytes) for phase in phases),
                mb(max(result.predicted.values())),
                *(f"{error:+.1%}" for error in result.errors),
                f"{seconds.total:.3f}",
                f"{seconds.rollout:.3f}",
            ]
        )
    return text_table(headings, rows)


def equal_memory_table(results: Sequence[Result]) -> str:
    rows = []
    base = next((result for result in results if result.variant == BASELINE), None)
    for result in results:
        if result.largest_batch is None:
            continue
        seconds = result.seconds_at_largest
        cells = ["–"] * 5
        if seconds is not None and result.peak_at_largest is not None:
            times = (seconds.total, seconds.rollout, seconds.update)
            cells = [mb(result.peak_at_largest), *(f"{value:.3f}" for value in times)]
            against = base.seconds_at_largest if base else None
            cells.append(f"{seconds.total / against.total - 1:+.0%}" if against else "–")
        rows.append([result.variant, str(result.largest_batch or "does not fit"), *cells])
    return text_table(["", "batch", "peak MB", "s/sample", "rollout", "update", f"to {BASELINE}"], rows)


def paper_table() -> str:
    """Static bytes of Llama-7B by the formula, beside the paper's totals."""
    headings = ["GB", "static", "with Adam in float32", "paper", "remains", "tokens", "paper's s/sample"]
    rows = []
    for name in (*LAYOUTS, SFT):
        variant = variant_of(name)
        jobs = [
            Job(LLAMA_7B, PAPER_RANK, 1, 0, ASSUMED_LEN, 0, 2, moment_bytes=n_bytes, beside_bytes=2)
            for n_bytes in (2, 4)
        ]
        half, full = (sum(static_bytes(variant, job).values()) / GB for job in jobs)
        cells = ["–"] * 3
        if (paper := PAPER_GB.get(name)) is not None:
            per_token = LLAMA_7B.n_layers * saved_bytes_per_token(variant, jobs[0]) / GB
            cells = [f"{paper:.1f}", f"{paper - full:.1f}", f"{(paper - full) / per_token:,.0f}"]
        seconds = PAPER_SECONDS.get(name)
        rows.append(
            [name, f"{half:.1f}", f"{full:.1f}", *cells, "–" if seconds is None else f"{seconds:.2f}"]
        )
    return text_table(headings, rows)


PAPER_NOTE = f"""\
Static is weights, adapters of rank {PAPER_RANK} on all linear layers, heads, gradients and Adam, in float16.
What remains of the paper's total is not explained by the formula: activations, the KV cache, logits, the
allocator's slack, and weights that mixed precision may keep twice. "tokens" is how many tokens of one
forward and backward pass without checkpointing would fill it, at {ASSUMED_LEN} per sequence. The paper's
totals are at different batches, chosen to fill one GPU: they compare in seconds and not in gigabytes."""
