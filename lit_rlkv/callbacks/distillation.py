"""Track 2 of Shadow Mask Distillation: a KL between dense and shadow policy, as one more loss term."""

from contextlib import nullcontext
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.kernels.token_logps import policy_kl
from lit_rlkv.models.backbone import head_is_frozen, head_logits, text_config
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import response_hidden
from lit_rlkv.modules.base import PolicyModule, StepOutputs, Terms
from lit_rlkv.types import TrainBatch

DIRECTIONS = ("dense_student", "sparse_student")
TEACHERS = ("policy", "reference")


class ShadowDistillation(RLCallback):
    """weight · KL over the full vocabulary at every action (arXiv:2605.06850).

    `dense_student`: KL(π_dense ‖ sg π_shadow), the authors' formula. `sparse_student`:
    KL(sg π_dense ‖ π_shadow), which teaches the sparse context what eviction lost. The teacher, behind the
    stop-gradient, is the current policy or the frozen reference.

    Replay trains the sparse policy only, and what that does to the dense one is a side effect.
    `anchor_weight` adds anchor_weight · KL(sg π_reference ‖ π) on dense contexts, which holds the dense
    policy where it was. With weight=0 it is all there is, for any arm: a frozen teacher is also a
    regulariser, and this one has nothing of the shadow.
    """

    def __init__(
        self, direction: str, weight: float | int, teacher: str, anchor_weight: float | int = 0.0
    ) -> None:
        if direction not in DIRECTIONS:
            raise ValueError(
                f"distillation direction {direction!r} is unknown; choose one of {', '.join(DIRECTIONS)}"
            )
        if teacher not in TEACHERS:
            raise ValueError(
                f"distillation teacher {teacher!r} is unknown; choose one of {', '.join(TEACHERS)}"
            )
        if weight < 0 or anchor_weight < 0 or weight == anchor_weight == 0:
            raise ValueError(
                f"distillation.weight={weight} with distillation.anchor_weight={anchor_weight} has no effect "
                "or pushes away; give a positive weight, or distillation=none"
            )
        self.direction = direction
        self.weight = weight
        self.teacher = teacher
        self.anchor_weight = anchor_weight

    @property
    def needs(self) -> tuple[str, ...]:
        """Roles beside the policy that it reads."""
        asks = (self.weight > 0 and self.teacher == "reference") or self.anchor_weight > 0
        return ("reference",) if asks else ()

    def loss_terms(
        self, module: PolicyModule, batch: TrainBatch, outputs: StepOutputs
    ) -> tuple[Terms, Terms]:
        """The weighted KLs, averaged over all actions of the optimizer step."""
        to_sparse = self.direction == "sparse_student"

        @cache
        def hidden(role: str, *, shadow: bool, trains: bool) -> Float[Tensor, "action dim"]:
            """Of the actions; what the step or the other term has run already is not run again."""
            if role == "policy" and shadow == module.replays:
                return outputs.hidden if trains else outputs.hidden.detach()
            with nullcontext() if trains else torch.no_grad(), acting_as(module.roles, role) as backbone:
                return response_hidden(backbone, batch.rollout, shadow=shadow)

        asked = (
            # name, weight, the teacher and its view, the student's view, which of them leads
            ("smd", self.weight, self.teacher, not to_sparse, to_sparse, to_sparse),
            ("smd/anchor", self.anchor_weight, "reference", False, False, True),
        )
        losses: Terms = {}
        metrics: Terms = {}
        for name, weight, role, teacher_shadow, student_shadow, teacher_leads in asked:
            if weight > 0:
                student = hidden("policy", shadow=student_shadow, trains=True)
                teacher = hidden(role, shadow=teacher_shadow, trains=False)
                loss, more = self._term(
                    name, weight, module, batch, role, teacher, student, teacher_leads=teacher_leads
                )
                losses, metrics = losses | loss, metrics | more
        return losses, metrics

    def _term(
        self,
        name: str,
        weight: float,
        module: PolicyModule,
        batch: TrainBatch,
        role: str,
        teacher: Float[Tensor, "action dim"],
        student: Float[Tensor, "action dim"],
        *,
        teacher_leads: bool,
    ) -> tuple[Terms, Terms]:
        """weight · KL(teacher ‖ student) where the teacher leads, else weight · KL(student ‖ teacher)."""
        backbone = module.roles.backbone("policy")
        head = partial(head_logits, backbone)
        vocab_size = text_config(backbone).vocab_size

        def frozen_head(hidden: Tensor) -> Tensor:
            return head_logits(module.roles.backbone(role), hidden).detach()

        sides = ((teacher, frozen_head), (student, head))
        (hidden_p, head_p), (hidden_q, head_q) = sides if teacher_leads else reversed(sides)
        token_kl = policy_kl(
            hidden_p,
            hidden_q,
            head_p,
            head_q,
            module.temperature,
            vocab_size,
            heads_are_frozen=head_is_frozen(backbone),
        )
        mean_kl = token_kl.sum() / batch.n_response_tokens
        losses = {f"{name}/loss": weight * mean_kl}
        return losses, {**losses, f"{name}/kl": mean_kl.detach()}
