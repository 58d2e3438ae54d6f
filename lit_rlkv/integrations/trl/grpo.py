"""EvictingGRPOTrainer: TRL's GRPOTrainer with evicting rollouts, replay, corrections and distillation."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer

from lit_rlkv.integrations.trl.batches import (
    as_reference,
    causal_lm,
    has_adapter,
    token_sets,
    view_of,
    whole_rows,
)
from lit_rlkv.integrations.trl.config import CORRECTIONS, EvictingGRPOConfig
from lit_rlkv.integrations.trl.replaying import EvictingTrainer
from lit_rlkv.models.backbone import head_is_frozen, head_logits, hidden_states, text_config, token_positions
from lit_rlkv.models.preparation import check_chunks
from lit_rlkv.objectives.corrections import unweighted
from lit_rlkv.objectives.distillation import distillation_loss
from lit_rlkv.rollout.open_rollout import OpenRollout


class EvictingGRPOTrainer(EvictingTrainer, GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose rollouts evict keys, and whose learner replays the evictions.

    Arguments are those of `GRPOTrainer`, with an `EvictingGRPOConfig` as `args`. A `rollout_func` must return
    `evicted_at`, too, the evictions of each row as `LogRow` takes them, or None; the config's cache has no
    effect then. Metrics are TRL's, and

    - `kv/replay_gap`: the largest |log π − log sampler| of a completion token before the first update on a
      rollout, in nats; with a correction other than "shadow" it is the mismatch of the dense learner;
    - `kv/bytes`: allocated keys and values, summed over processes;
    - `kv/affected_rows`, `kv/affected`: share of completions that lost keys, and of their tokens after that;
    - `smd/kl`: the KL of the distillation, mean over completion tokens, in nats.

    With `tools` or an `environment_factory` a row waits in its cache while they run, and is one row for the
    learner, which replays it through all its turns.

    Dropout is set to 0, because sampler and learner must compute the same function.

    Raises:
        TypeError: `args` is not an `EvictingGRPOConfig`.
        ValueError: the model cannot be replayed, or an argument asks for what the rollout cannot do.
    """

    config_class = EvictingGRPOConfig
    algorithm = "GRPO"

    def __init__(
        self,
        model: "str | PreTrainedModel | Any",
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        **arguments: Any,
    ) -> None:
        self._open: OpenRollout | None = None
        super().__init__(model, reward_funcs, args, *positional, **arguments)
        if self.tools:
            check_chunks(causal_lm(self.model))
        self.has_entropy_bonus = self._entropy_bonus_enabled
        self._weight_fn = CORRECTIONS[self.args.correction]
        is_anchored = self.ref_model is not None or has_adapter(self.model)
        if self.args.distillation == "sparse_student" and not is_anchored:
            raise ValueError(
                "distillation='sparse_student' needs a frozen teacher, and TRL keeps no reference at beta=0; "
                "set beta above 0 (1e-6 is enough), or train a peft adapter"
            )

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample completions; with tools, the turns of rows that then wait in their cache.

        TRL gives a row that goes on all its tokens, with the results of its tools at the end.
        """
        if not self.tools:
            return self.sample(prompt_ids)
        with self._sampler() as model:
            if self._open is None:
                options = self._rollout_options(prompt_ids)
                self._open = OpenRollout(model, sampling=self.args.sampling(), **options)
                turns = [a[len(b) :] for a, b in zip(self._open.sequences, prompt_ids, strict=True)]
            else:
                turns = self._open.go_on(prompt_ids)
        return turns, [[0.0] * len(ids) for ids in turns]  # `_generate` has the log-probs

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Close the rollout once no row calls a tool any more."""
        self._open = None
        found = super()._generate(prompts)
        if self._open is None:
            return found
        prompt_ids, completion_ids, tool_mask, completions, _, *others = found
        rollout = self._open.close([[*a, *b] for a, b in zip(prompt_ids, completion_ids, strict=True)])
        self._open = None
        _, logps = self._take(rollout, prompt_ids)
        return prompt_ids, completion_ids, tool_mask, completions, logps, *others

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Add the rows of the rollout to TRL's batch, and the importance weights to its advantages."""
        output = super()._generate_and_score_completions(inputs)
        if self._weight_fn is unweighted:
            return output
        old_logps = output.get("old_per_token_logps")
        if old_logps is None:
            input_ids, attention_mask, n_completion = whole_rows(output)
            size = self.args.train_batch_size if self._mode == "train" else self.args.eval_batch_size
            with torch.no_grad():
                old_logps, _, _ = self._get_per_token_logps_and_entropies(
                    self.model, input_ids, attention_mask, n_completion, batch_size=size
                )
        log_ratio = old_logps - output["sampling_per_token_logps"]
        weight = self._weight_fn(log_ratio, output["completion_mask"].bool()).weight
        if self.loss_type == "vespo":
            output["importance_sampling_ratio"] = weight  # it weighs whole sequences, by this name
        else:
            # Every other loss is linear in the advantage of a token, and a weight is never negative.
            output["advantages"] = output["advantages"][:, None] * weight
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's loss under the learner's view of the keys, with the distillation's."""
        loss = super()._compute_loss(model, inputs)
        if self.args.distillation == "none":
            return loss
        assert self._learner_states is not None
        return loss + self._distillation_loss(self._learner_states, inputs)

    def _distillation_loss(self, learner_states: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return weight · KL, averaged over the completion tokens of the optimizer step."""
        assert self._rollout is not None
        rollout = self._rollout
        input_ids, attention_mask, n_completion = whole_rows(inputs)
        is_read = torch.zeros_like(attention_mask[:, 1:], dtype=torch.bool)
        is_read[:, -n_completion:] = inputs["completion_mask"].bool()
        is_read &= rollout.response_mask[:, 1:]
        policy = self.accelerator.unwrap_model(self.model)

        def states(model: Any, *, shadow: bool) -> Tensor:
            with self.accelerator.autocast():
                hidden = hidden_states(
                    causal_lm(model),
                    input_ids,
                    token_positions(attention_mask),
                    record=view_of(rollout, attention_mask, shadow=shadow),
                )
            return hidden[:, :-1][is_read]

        def policy_states(*, shadow: bool, trains: bool) -> Tensor:
            if shadow == self._replays:
                return learner_states if trains else learner_states.detach()
            with nullcontext() if trains else torch.no_grad():
                return states(policy, shadow=shadow)

        to_sparse = self.args.distillation == "sparse_student"
        student = policy_states(shadow=to_sparse, trains=True)
        if to_sparse:
            teacher_model = (
                policy if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
            )
            with torch.no_grad(), as_reference(teacher_model) if self.ref_model is None else nullcontext():
                teacher = states(teacher_model, shadow=False)
        else:
            teacher_model = policy
            teacher = policy_states(shadow=True, trains=False)
        backbone = causal_lm(policy)
        with self.accelerator.autocast():
            kl_sum = distillation_loss(
                teacher,
                student,
                partial(head_logits, causal_lm(teacher_model)),
                partial(head_logits, backbone),
                self.temperature,
                text_config(backbone).vocab_size,
                1,
                beta=0 if to_sparse else 1,
                heads_are_frozen=head_is_frozen(backbone),
                sets=token_sets(rollout, is_read),
            )
        totals = self.accelerator.reduce(torch.stack([kl_sum.detach(), is_read.sum()]))
        self._metrics[self._mode]["smd/kl"].append((totals[0] / totals[1].clamp(min=1)).item())
        # TRL counts the tokens of the rollout; gradients are averaged over processes.
        n_tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self._mode == "train":
            n_tokens = n_tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return self.args.distillation_weight * kl_sum / n_tokens
