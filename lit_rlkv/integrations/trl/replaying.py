"""EvictingTrainer: the part that GRPO and RLOO share, evicting rollouts and a learner that replays them."""

import copy
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import get_config_model_id, pad

from lit_rlkv.diagnostics.evictions import affected_shares
from lit_rlkv.integrations.trl.batches import (
    causal_lm,
    replaced_states,
    rollout_of,
    token_sets,
    view_of,
)
from lit_rlkv.integrations.trl.config import EvictingConfig
from lit_rlkv.integrations.trl.refusals import (
    check_arguments,
    refuse_generation_options,
    refuse_processor,
)
from lit_rlkv.kernels.token_logps import TokenSets, token_logps_and_entropy
from lit_rlkv.log_row import LogRow
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.activations import checkpoint_layers
from lit_rlkv.models.attention import ATTENTION_NAME
from lit_rlkv.models.backbone import (
    head_is_frozen,
    head_logits,
    optional_setting,
    replay_arguments,
    text_config,
    token_positions,
)
from lit_rlkv.models.learner import ForwardInput, each_token_once
from lit_rlkv.models.lm_head import model_body
from lit_rlkv.models.replay import check_rollout
from lit_rlkv.models.routing import replayed_routing, routers_of
from lit_rlkv.objectives.entropy import token_entropy
from lit_rlkv.rollout import generate
from lit_rlkv.tasks.rows import parse_rows
from lit_rlkv.types import Rollout

log = logging.getLogger(__name__)


class EvictingTrainer(_BaseTrainer):  # type: ignore[misc]
    """Extends a trainer of TRL that stands after it among the bases.

    Five of its methods are extended: the rollout (`_generate_single_turn`, which calls `sample`, and GRPO's
    `_generate`), the batch (`_generate_and_score_completions`), the log-probs
    (`_get_per_token_logps_and_entropies`) and the loss (`_compute_loss`). They are private, so TRL is pinned.
    """

    config_class: ClassVar[type[EvictingConfig]]
    algorithm: ClassVar[str]
    """Ends the default `output_dir`, as in TRL."""
    has_entropy_bonus = False
    """True if the entropies need a gradient."""

    def __init__(
        self,
        model: "str | PreTrainedModel | Any",
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        **arguments: Any,
    ) -> None:
        _, _, _, *others = signature(super().__init__).parameters
        arguments |= dict(zip(others, positional, strict=False))
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{name.split('/')[-1]}-{self.algorithm}")
        check_arguments(type(self), model, args, arguments)
        if isinstance(model, str):
            options = dict(args.model_init_kwargs or {})
            args = copy.copy(args)  # the user's stays as it is
            args.model_init_kwargs = {**options, "attn_implementation": ATTENTION_NAME}
        else:
            prepare_backbone(causal_lm(model))  # before TRL copies its attention for the reference
        if (rollout_func := arguments.get("rollout_func")) is not None:
            arguments["rollout_func"] = partial(self._sample_elsewhere, rollout_func)
        self._spec = args.cache_spec()
        self._replays = args.correction == "shadow"
        self._is_first = True
        self._rollout: Rollout | None = None
        """Rows of the batch at hand, with its columns."""
        self._learner_logps: Tensor | None = None
        self._learner_states: Tensor | None = None
        """Hidden states that predict the completions of the last forward."""
        super().__init__(model, reward_funcs, args, **arguments)
        refuse_processor(self.processing_class)  # TRL loads one if it is given none
        self.processing_class.clean_up_tokenization_spaces = False  # rewards score the text that was sampled
        prepare_backbone(causal_lm(self.model))
        refuse_generation_options(causal_lm(self.model).generation_config)
        if args.replay_routing:
            routers_of(causal_lm(self.model))  # refuses a model without routing to replay
        if self.is_fsdp_enabled or self._dist.is_zero3:
            raise ValueError(
                f"{type(self).__name__} must have the whole weights on each process, and FSDP and DeepSpeed "
                "ZeRO-3 shard them; use DDP, or lit_rlkv.fit, which shards by FSDP2"
            )

    def sample(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Sample a completion for each prompt under the evicting cache.

        Returns:
            Tokens and log-probs of each completion.
        """
        with self._sampler() as model:
            rollout = generate(model, **self._rollout_options(prompt_ids), **self.args.sampling().options)
        return self._take(rollout, prompt_ids)

    @contextmanager
    def _sampler(self) -> Iterator[PreTrainedModel]:
        """Yield the model that samples, as TRL prepares it."""
        with (
            profiling_context(self, "lit_rlkv.generate"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self.accelerator.autocast(),
        ):
            yield causal_lm(model)

    def _rollout_options(self, prompt_ids: list[list[int]]) -> dict[str, Any]:
        """Return arguments of `generate` for these prompts; equal neighbours share a prefill."""
        n = math.gcd(*(len(list(run)) for _, run in groupby(prompt_ids)))
        prompts = [torch.tensor(ids) for ids in prompt_ids[::n]]
        options = {"padding_side": "left", "pad_to_multiple_of": self.pad_to_multiple_of}
        device, pad_id = self.accelerator.device, self._tokenizer.pad_token_id
        return {
            "input_ids": pad(prompts, padding_value=pad_id, **options).to(device),
            "attention_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, **options).to(
                device
            ),
            "cache": self._spec,
            "max_new_tokens": self.max_completion_length,
            "eos_token_id": self.eos_token_ids,
            "pad_token_id": pad_id,
            "num_return_sequences": n,
            "record_routing": self.args.replay_routing,
        }

    def _keep(self, rollout: Rollout) -> dict[str, float]:
        """Keep a rollout for the batch at hand, in the columns of TRL's; return and log its metrics."""
        n_padding = -rollout.input_ids.shape[1] % (self.pad_to_multiple_of or 1)  # of TRL's completions
        self._rollout = rollout.padded(n_padding) if n_padding else rollout
        n_bytes = self.accelerator.reduce(torch.tensor(rollout.kv_bytes, device=self.accelerator.device))
        found = {"kv/bytes": n_bytes.item(), **affected_shares(rollout, self.accelerator.reduce)}
        for name, value in found.items():
            self._metrics[self._mode][name].append(value)
        return found

    def _take(
        self, rollout: Rollout, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Keep a rollout of this trainer's own, and return what `sample` does."""
        found = self._keep(rollout)
        if self._is_first and found["kv/affected_rows"] == 0 and not self._spec.is_dense:
            log.warning(self._spec.explain_no_evictions("cache_", rollout.attention_mask))
        self._is_first = False
        rows = zip(
            rollout.input_ids,
            rollout.rollout_logps,
            rollout.attention_mask,
            map(len, prompt_ids),
            strict=True,
        )
        parts = [(ids[mask][n:].tolist(), logps[mask][n:].tolist()) for ids, logps, mask, n in rows]
        return [ids for ids, _ in parts], [logps for _, logps in parts]

    def _sample_elsewhere(self, rollout_func: Any, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Call the `rollout_func` of another engine, and keep the rollout of its log."""
        output, none = dict(rollout_func(prompts, trainer)), [None] * len(prompts)
        names = ("prompt_ids", "completion_ids", "logprobs", "evicted_at")
        if missing := [name for name in names if name not in output]:
            raise ValueError(
                f"rollout_func must return {', '.join(missing)}; evicted_at has the times of each row as "
                "lit_rlkv.LogRow takes them, or is None"
            )
        parts = [output[name] for name in names[:3]]
        parts += [output.pop("evicted_at") or none, output.get("env_mask") or none]
        named = ((f"row {n} of rollout_func", row) for n, row in enumerate(zip(*parts, strict=True)))
        rows = parse_rows(named, lambda row: LogRow(*row))
        rollout = Rollout.from_log(rows, temperature=self.temperature)
        check_rollout(causal_lm(self.model), rollout)
        rollout = rollout.padded(0, -max(map(len, parts[0])) % (self.pad_to_multiple_of or 1))
        self._keep(replace(rollout.to(self.accelerator.device), record=rollout.record))
        return output

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Add the rows of the rollout to TRL's batch."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["rollout_rows"] = [(self._rollout, row) for row in range(len(output["prompt_ids"]))]
        output["sampled_at_step"] = torch.tensor(self.state.global_step)
        return output

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return TRL's log-probs, entropies and auxiliary loss under the learner's view of the keys.

        Log-probs and entropies are of distributions over the tokens that the sampler chose from.
        """
        assert self._rollout is not None
        batch_size = batch_size or len(input_ids)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(input_ids), batch_size):
            rows = slice(start, start + batch_size)
            part = super()._get_per_token_logps_and_entropies(
                partial(self._forward, model, self._rollout.rows(rows).to(input_ids.device), logits_to_keep),
                input_ids[rows],
                attention_mask[rows],
                logits_to_keep,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
            )
            parts.append(part)
        logps, entropies, aux_losses = zip(*parts, strict=True)
        self._learner_logps = torch.cat(logps)
        return (
            self._learner_logps,
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def _forward(
        self,
        model: Any,
        rollout: Rollout,
        n_completion: int,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        **options: Any,
    ) -> Any:
        """Call the model in TRL's place: each different token once, and logits of completions alone.

        Args:
            labels: [batch, seq], -100 outside of completions.
        """
        is_read = (labels[:, 1:] != -100) & rollout.response_mask[:, 1:]  # not the results of tools
        sets = token_sets(rollout, is_read)
        record = view_of(rollout, attention_mask, shadow=self._replays)
        positions = token_positions(attention_mask)
        backbone = causal_lm(self.accelerator.unwrap_model(model))
        tokens = labels[:, 1:][is_read]
        once = ForwardInput(input_ids, positions, record)
        if optional_setting(text_config(backbone), "output_router_logits"):
            options.setdefault("output_router_logits", False)  # where TRL drops the auxiliary loss
        counts_tokens = options.get("output_router_logits")  # of the real mask, for the auxiliary loss
        if not counts_tokens:
            is_token = attention_mask.bool() & F.pad(attention_mask[:, 1:].bool(), (0, 1))
            n_prompt = torch.full_like(labels[:, 0], labels.shape[1] - n_completion)
            once = each_token_once(backbone, input_ids, positions, is_token, n_prompt, record)
        arguments = replay_arguments(backbone, once.record, flat=once.flat)
        if counts_tokens:
            arguments["attention_mask"] = attention_mask
        if record.expert_ids is not None and torch.is_grad_enabled() and backbone.is_gradient_checkpointing:
            checkpoint_layers(backbone)  # which recompute with the experts of their forward
        # With sets the log-probs are computed below, and TRL's head gets no position.
        n_scored = len(tokens) if sets is None else 0

        def read(states: Tensor) -> Tensor:
            self._learner_states = once.spread(states)[:, :-1][is_read]
            return self._learner_states[None, :n_scored]

        with (
            replayed_routing(backbone, once.record),
            replaced_states(model_body(backbone), read),
        ):
            outputs = model(
                input_ids=once.input_ids,
                position_ids=once.positions,
                shift_labels=tokens[None, :n_scored],
                **arguments,
                **options,
            )
        if sets is not None:
            outputs.log_probs, outputs.entropy = self._score(backbone, tokens, sets)
        for name in ("log_probs", "entropy"):
            if (values := getattr(outputs, name)) is not None:
                setattr(outputs, name, values.new_zeros(is_read.shape).masked_scatter(is_read, values))
        return outputs

    def _score(self, backbone: PreTrainedModel, tokens: Tensor, sets: TokenSets) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the last forward's distributions, renormalised over the sets."""
        assert self._learner_states is not None
        head = (self._learner_states, partial(head_logits, backbone))
        size = (self.temperature, text_config(backbone).vocab_size)
        is_frozen = head_is_frozen(backbone)
        logps, entropy = token_logps_and_entropy(*head, tokens, *size, head_is_frozen=is_frozen, sets=sets)
        if self.has_entropy_bonus and torch.is_grad_enabled():
            entropy = token_entropy(*head, *size, head_is_frozen=is_frozen, sets=sets)
        return logps, entropy

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's loss under the learner's view of the keys."""
        self._rollout = rollout_of(inputs["rollout_rows"])
        loss: Tensor = super()._compute_loss(model, inputs)
        if self.state.global_step == inputs["sampled_at_step"]:  # no update since the rollout
            self._log_gap(inputs)
        return loss

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @torch.no_grad()
    def _log_gap(self, inputs: dict[str, Any]) -> None:
        assert self._learner_logps is not None
        assert self._rollout is not None
        n_completion = self._learner_logps.shape[1]
        gap = (self._learner_logps - self._rollout.rollout_logps[:, -n_completion:]).abs()
        is_sampled = inputs["completion_mask"].bool() & self._rollout.response_mask[:, -n_completion:]
        gap = gap.masked_fill(~is_sampled, 0.0)
        largest = self.accelerator.gather(gap.max()).max().item()
        metrics = self._metrics[self._mode]  # TRL logs means of lists, and this is a maximum
        metrics["kv/replay_gap"] = [max([largest, *metrics["kv/replay_gap"]])]
