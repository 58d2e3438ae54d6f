"""Cases of the vocabulary's width: log-probs of tokens, and the KL of two policies, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from kernel_parts.accuracy import require_accurate
from kernel_parts.case import Arm, Builders, Case, Setting
from kernel_parts.counts import head_work
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kernels.token_logps import policy_kl, token_logps
from lit_rlkv.models.lm_head import logits_of

REAL = [(n_positions, 1536, 151_936) for n_positions in (4096, 8192, 16_384)]
TOY = [(n_positions, 32, 200) for n_positions in (24, 48)]
"""Positions, dim, vocabulary."""
N_PRODUCTS = {"log-probs": 3, "log-probs, frozen head": 2, "KL to a teacher, frozen head": 3}
"""Products with the head, forward and backward; without computing logits twice."""
N_WEIGHT_PASSES = {"log-probs": 3, "log-probs, frozen head": 2, "KL to a teacher, frozen head": 3}
"""Weights read in each of them, or their gradient written."""


@dataclass(frozen=True)
class Inputs:
    """Hidden states of a student, which learns, and of a teacher; a head for both."""

    student: Tensor
    teacher: Tensor
    weight: Tensor
    tokens: Tensor
    upstream: Tensor

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    def head(self, hidden: Tensor) -> Tensor:
        return logits_of(hidden, self.weight)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Copies of another precision that learn alike."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        return Inputs(copy(self.student), copy(self.teacher), copy(self.weight), self.tokens, self.upstream)


Values = Callable[[Inputs], Tensor]


def cases(setting: Setting) -> Builders:
    """Yield a case for each size, with a head that learns and with a frozen one."""
    for n_positions, dim, vocab in TOY if setting.is_toy else REAL:
        for what in N_PRODUCTS:
            label = f"{what}, {n_positions} positions"
            yield label, partial(_case, setting, label, what, n_positions, dim, vocab)


def make_inputs(setting: Setting, n_positions: int, dim: int, vocab: int, *, is_frozen: bool) -> Inputs:
    """Random, with logits of about unit variance."""
    student = setting.random(n_positions, dim, seed=0, requires_grad=True)
    nearby = 0.9 * student.detach() + 0.4 * setting.random(n_positions, dim, seed=1)
    weight = (setting.random(vocab, dim, seed=2) * dim**-0.5).requires_grad_(not is_frozen)
    draw = torch.Generator(setting.device).manual_seed(3)
    tokens = torch.randint(vocab, (n_positions,), generator=draw, device=setting.device)
    upstream = torch.rand(n_positions, generator=draw, device=setting.device)
    return Inputs(student, nearby, weight, tokens, upstream)


def _case(setting: Setting, label: str, what: str, n_positions: int, dim: int, vocab: int) -> Case:
    inputs = make_inputs(setting, n_positions, dim, vocab, is_frozen="frozen" in what)
    work = head_work(
        n_positions, dim, vocab, inputs.weight.element_size(), N_PRODUCTS[what], N_WEIGHT_PASSES[what]
    )
    values = values_of(what)
    ways: dict[str, Values] = {"chunked": partial(values, kernels=setting.timed_kernels)}
    if setting.timed_kernels != "reference":
        ways["reference"] = partial(values, kernels="reference")
    ways |= whole_ways(what)
    arms = tuple(Arm(name, partial(both_passes, inputs, way), work) for name, way in ways.items())
    return Case(
        op="token_logps",
        label=label,
        sizes={"what": what, "positions": n_positions, "dim": dim, "vocab": vocab},
        arms=arms,
        check=partial(check, label, what, inputs),
        bound="matmul",
        inputs=tuple(vars(inputs).values()),
    )


def both_passes(inputs: Inputs, values: Values) -> tuple[Tensor, ...]:
    """A number for each position, and the gradients of what learns."""
    out = values(inputs)
    trained = [tensor for tensor in (inputs.student, inputs.weight) if tensor.requires_grad]
    return out, *torch.autograd.grad(out, trained, inputs.upstream.to(out.dtype))


def values_of(what: str) -> Callable[..., Tensor]:
    """The operation of a case, which takes inputs and `kernels`."""
    return _kl if what.startswith("KL") else _logps


def _logps(inputs: Inputs, kernels: str) -> Tensor:
    is_frozen = not inputs.weight.requires_grad
    options = {"head_is_frozen": is_frozen, "kernels": kernels}
    return token_logps(inputs.student, inputs.head, inputs.tokens, 1.0, inputs.vocab, **options)


def _kl(inputs: Inputs, kernels: str) -> Tensor:
    """KL of the student from the teacher, which does not learn."""
    is_frozen = not inputs.weight.requires_grad
    hidden, heads = (inputs.student, inputs.teacher), (inputs.head, inputs.head)
    return policy_kl(*hidden, *heads, 1.0, inputs.vocab, heads_are_frozen=is_frozen, kernels=kernels)


def whole_ways(what: str) -> dict[str, Values]:
    """Baselines: plain torch without chunks, and torch's own function if there is one."""
    if what.startswith("KL"):
        return {"full logits": _whole_kl}
    ways: dict[str, Values] = {"full logits": _whole_logps}
    if getattr(F, "linear_cross_entropy", None) is not None:  # new in torch 2.13
        ways["F.linear_cross_entropy"] = _torch_logps
    return ways


def _whole_logps(inputs: Inputs) -> Tensor:
    logps = inputs.head(inputs.student).float().log_softmax(-1)
    return logps.gather(-1, inputs.tokens[:, None]).squeeze(-1)


def _whole_kl(inputs: Inputs) -> Tensor:
    student, teacher = (
        inputs.head(hidden).float().log_softmax(-1) for hidden in (inputs.student, inputs.teacher)
    )
    return F.kl_div(teacher, student, log_target=True, reduction="none").sum(-1)


def _torch_logps(inputs: Inputs) -> Tensor:
    """Return log-probs by torch's chunked cross-entropy, which gives no entropy."""
    options = torch.nn.LinearCrossEntropyOptions()
    operands = (inputs.student, inputs.weight, inputs.tokens)
    return -F.linear_cross_entropy(*operands, reduction="none", options=options)


def check(label: str, what: str, inputs: Inputs, values: Values | None = None) -> float:
    """All values and gradients, against the definition in float64."""
    definition = partial(values_of(what), kernels="reference")
    actual = both_passes(inputs, values or partial(values_of(what), kernels="triton"))
    plain = both_passes(inputs, definition)
    truth = both_passes(inputs.to(torch.float64), definition)
    names = ("values", "gradient of the hidden states", "gradient of the head")
    results = {name: three for name, *three in zip(names, actual, plain, truth, strict=False)}
    return require_accurate(f"token_logps, {label}", results)
