"""Callback that adds the loss of Shadow Mask Distillation to each training step."""

from contextlib import nullcontext
from functools import cache, partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.models.backbone import head_is_frozen, head_logits, text_config
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import response_hidden, response_sets
from lit_rlkv.modules.base import PolicyModule, StepOutputs, Terms
from lit_rlkv.objectives.distillation import distillation_loss
from lit_rlkv.settings import NonNegativeNumber, dataclass
from lit_rlkv.types import TrainBatch


class _Term(NamedTuple):
    """One KL term: role and view of the teacher, and view of the student."""

    name: str
    weight: float | int
    teacher: str
    teacher_shadow: bool
    student_shadow: bool
    beta: int


@dataclass(eq=False)
class ShadowDistillation(RLCallback):
    """Adds weight · KL over the full vocabulary at every response token to the loss (arXiv:2605.06850).

    Where `top_k`, `top_p` or `min_p` restricted the sampler, teacher and student are of the tokens that it
    chose from.

    `dense_student` is KL(π_dense ‖ sg π_shadow), the authors' formula. `sparse_student` is
    KL(sg π_dense ‖ π_shadow): the policy under the shadow mask learns what eviction removed. The teacher,
    behind the stop-gradient, is the current policy or the frozen reference.

    Replay trains only the sparse policy; the dense policy changes as a side effect. `anchor_weight` adds
    anchor_weight · KL(sg π_reference ‖ π) on dense contexts, which keeps the dense policy near the reference.
    With weight=0 the anchor is the only term and works with any correction; it is the control for the
    regularization by a frozen teacher.

    Raises:
        ValueError: the direction or teacher is unknown, a weight is negative or not finite, or both are 0.
    """

    n_graphs = 1  # of the policy under the other view

    direction: Literal["dense_student", "sparse_student"]
    """which of the two policies learns from the other"""
    weight: NonNegativeNumber
    """of the KL between them, in nats per response token"""
    teacher: Literal["policy", "reference"]
    """role behind the stop-gradient"""
    anchor_weight: NonNegativeNumber = 0.0
    """of the KL to the dense reference"""

    def __post_init__(self) -> None:
        if self.weight == self.anchor_weight == 0:
            raise ValueError(
                "weight or anchor_weight must be above 0, got 0 for both; raise one, or set distillation=none"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """Roles that it uses besides the policy."""
        reads_reference = (self.weight > 0 and self.teacher == "reference") or self.anchor_weight > 0
        return ("reference",) if reads_reference else ()

    def loss_terms(
        self, module: PolicyModule, batch: TrainBatch, outputs: StepOutputs
    ) -> tuple[Terms, Terms]:
        """Return the weighted mean KLs over the response tokens of the optimizer step, and metrics."""
        to_sparse = self.direction == "sparse_student"
        backbone = module.roles.backbone("policy")

        @cache
        def hidden(role: str, *, shadow: bool, trains: bool) -> Float[Tensor, "token dim"]:
            """Return the hidden states of the response tokens; each forward runs at most once a step."""
            if role == "policy" and shadow == module.replays:
                return outputs.hidden if trains else outputs.hidden.detach()
            with nullcontext() if trains else torch.no_grad(), acting_as(module.roles, role) as acting:
                return response_hidden(acting, batch.rollout, shadow=shadow)

        terms = (
            _Term("smd", self.weight, self.teacher, not to_sparse, to_sparse, 0 if to_sparse else 1),
            _Term("smd/anchor", self.anchor_weight, "reference", False, False, beta=0),
        )
        losses: Terms = {}
        metrics: Terms = {}
        for term in terms:
            if term.weight > 0:
                student = hidden("policy", shadow=term.student_shadow, trains=True)
                teacher = hidden(term.teacher, shadow=term.teacher_shadow, trains=False)
                mean_kl = distillation_loss(
                    teacher,
                    student,
                    partial(head_logits, module.roles.backbone(term.teacher)),
                    partial(head_logits, backbone),
                    module.temperature,
                    text_config(backbone).vocab_size,
                    batch.n_response_tokens,
                    beta=term.beta,
                    heads_are_frozen=head_is_frozen(backbone),
                    sets=response_sets(batch.rollout),
                )
                losses[f"{term.name}/loss"] = term.weight * mean_kl
                metrics[f"{term.name}/loss"] = losses[f"{term.name}/loss"]
                metrics[f"{term.name}/kl"] = mean_kl.detach()
        return losses, metrics
