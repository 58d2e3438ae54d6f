"""Cases of token sampling: one decode step's tokens, log-probs and entropies from the logits."""

from collections.abc import Callable
from functools import partial

import torch
from kernel_parts.accuracy import require_accurate
from kernel_parts.case import Arm, Builders, Case, Setting
from kernel_parts.counts import sampling_work
from torch import Tensor

from lit_rlkv.kernels.token_logps.reference import chosen_logps_and_entropy
from lit_rlkv.kernels.token_sampling import sample_tokens_and_entropy

REAL = [(n_rows, 151_936) for n_rows in (1, 64, 256, 1024)]
TOY = [(n_rows, 200) for n_rows in (1, 6)]
"""Rows, vocabulary."""
TEMPERATURE = 0.7

Draw = Callable[..., tuple[Tensor, Tensor, Tensor]]


def cases(setting: Setting) -> Builders:
    """Yield a case for each size."""
    for n_rows, vocab in TOY if setting.is_toy else REAL:
        label = f"{n_rows} rows"
        yield label, partial(_case, setting, label, n_rows, vocab)


def _case(setting: Setting, label: str, n_rows: int, vocab: int) -> Case:
    logits = 2 * setting.random(n_rows, vocab, seed=0).float()  # as the head of the model returns them
    generator = torch.Generator(setting.device).manual_seed(1)
    work = sampling_work(n_rows, vocab, logits.element_size())
    names = ["sampling"] if setting.timed_kernels == "reference" else ["sampling", "reference"]
    arms = tuple(
        Arm(name, partial(draw, logits, generator, kernels), work)
        for name, kernels in zip(names, (setting.timed_kernels, "reference"), strict=False)
    )
    return Case(
        op="token_sampling",
        label=label,
        sizes={"rows": n_rows, "vocab": vocab},
        arms=arms,
        check=partial(check, label, logits, generator),
        inputs=(logits,),
    )


def draw(logits: Tensor, generator: torch.Generator, kernels: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and entropies."""
    return sample_tokens_and_entropy(logits, TEMPERATURE, generator, kernels=kernels)


def check(label: str, logits: Tensor, generator: torch.Generator, drawn: Draw | None = None) -> float:
    """Log-probs of the drawn tokens, and entropies, against the definition in float64."""
    tokens, *actual = (drawn or partial(draw, kernels="triton"))(logits, generator)
    plain = chosen_logps_and_entropy(logits, tokens, TEMPERATURE)
    truth = chosen_logps_and_entropy(logits.double(), tokens, TEMPERATURE)
    results = dict(zip(("log-probs", "entropies"), zip(actual, plain, truth, strict=True), strict=True))
    return require_accurate(f"token_sampling, {label}", results)
