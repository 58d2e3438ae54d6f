"""Callback that distils another frozen model into the policy, on the policy's own responses."""

from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.models.backbone import head_is_frozen, head_logits, text_config
from lit_rlkv.models.replay import response_hidden, response_sets
from lit_rlkv.modules.base import PolicyModule, StepOutputs, Terms
from lit_rlkv.objectives.distillation import distillation_loss
from lit_rlkv.settings import PositiveNumber, Share, Text, dataclass
from lit_rlkv.types import TrainBatch


@dataclass(eq=False)
class ModelDistillation(RLCallback):
    """Adds weight · divergence from a teacher, over the full vocabulary at every response token, to the loss.

    The teacher is a frozen model of any size with the policy's tokenizer, and reads all keys. If the learner
    replays, the policy reads the keys that its cache held, else it reads all. This is on-policy distillation
    (arXiv:2306.13649).

    Raises:
        ValueError: an option is out of its range.
    """

    model: Text
    """checkpoint folder, GGUF file or hub name of the teacher"""
    weight: PositiveNumber = 1.0
    """of the divergence, in nats per response token"""
    beta: Share = 1.0
    """1: KL(π ‖ teacher), 0: KL(teacher ‖ π), between them GKD's JSD; see `distillation_loss`"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """of the teacher's weights; null: that of the run"""

    def __post_init__(self) -> None:
        self.teacher: PreTrainedModel | None = None
        """Set by the run once it is loaded."""

    def loss_terms(
        self, module: PolicyModule, batch: TrainBatch, outputs: StepOutputs
    ) -> tuple[Terms, Terms]:
        """Return the weighted mean divergence over the response tokens of the optimizer step, and metrics."""
        backbone, teacher = module.roles.backbone("policy"), self.teacher
        assert teacher is not None
        vocab_size = text_config(backbone).vocab_size
        with torch.no_grad():  # routers of another architecture take no experts of the sampler's
            hidden = response_hidden(teacher, batch.rollout, shadow=False, routing=False)

        def teacher_logits(hidden: Float[Tensor, "token dim"]) -> Float[Tensor, "token vocab"]:
            """Return the logits of the policy's vocabulary; the teacher's may end in more padding."""
            return head_logits(teacher, hidden)[:, :vocab_size]

        mean = distillation_loss(
            hidden,
            outputs.hidden,
            teacher_logits,
            partial(head_logits, backbone),
            module.temperature,
            vocab_size,
            batch.n_response_tokens,
            beta=self.beta,
            heads_are_frozen=head_is_frozen(backbone),
            sets=response_sets(batch.rollout),
        )
        loss = self.weight * mean
        return {"teacher/loss": loss}, {"teacher/loss": loss, "teacher/kl": mean.detach()}
