"""TRL's GRPOTrainer with rollouts under a KV cache of fixed size, which the learner replays exactly.

    from lit_rlkv.integrations.trl import EvictingGRPOConfig, EvictingGRPOTrainer

Data, rewards, advantages, losses, logs and checkpoints are TRL's. Four of its methods are extended: the
rollout (`_generate_single_turn`), the batch (`_generate_and_score_completions`), the log-probs
(`_get_per_token_logps_and_entropies`) and the loss (`_compute_loss`). They are private, so TRL is pinned.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, ProcessorMixin

from lit_rlkv.checks import check_temperature, is_number
from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.shadow_attention import plan_slots
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.attention import ATTENTION_NAME
from lit_rlkv.models.backbone import head_is_frozen, head_logits, hidden_states, text_config, token_positions
from lit_rlkv.models.replay import dense_evicted_at, replay_evicted_at
from lit_rlkv.objectives.corrections import WeightFn, masked, truncated, unweighted
from lit_rlkv.objectives.distillation import distillation_kl
from lit_rlkv.rollout import generate

SUPPORTED_TRL = ">=1.16,<1.17"
"""Releases of TRL whose private methods are known; the extra `trl` has the same range."""


def check_trl_version() -> None:
    """Check that TRL is installed in a supported release.

    Raises:
        ImportError: TRL is missing, or its release is outside of `SUPPORTED_TRL`.
    """
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = "none"
    if found == "none" or not SpecifierSet(SUPPORTED_TRL).contains(found, prereleases=True):
        raise ImportError(
            f"lit_rlkv.integrations.trl must have trl{SUPPORTED_TRL}, found {found}; "
            "run: pip install 'lit_rlkv[trl]'"
        )


check_trl_version()

from trl import GRPOConfig, GRPOTrainer  # noqa: E402 - after the check, whose error is clearer
from trl.extras.profiling import profiling_context  # noqa: E402
from trl.models import unwrap_model_for_generation  # noqa: E402
from trl.trainer.utils import get_config_model_id, pad, use_adapter  # noqa: E402

CORRECTIONS: dict[str, WeightFn] = {
    "shadow": unweighted,
    "naive": unweighted,
    "tis": truncated,
    "mis": masked,
}
"""Weight functions by correction; with `shadow` the learner replays, with the others it is dense."""
DISTILLATIONS = ("none", "dense_student", "sparse_student")

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_vllm": ((False,), "vLLM does not record evictions"),
    "use_transformers_continuous_batching": ((False,), "a paged cache does not record evictions"),
    "cache_implementation": ((None,), "the cache is the one of cache_policy and cache_budget"),
    "top_p": ((1.0,), "the learner's log-probs are of the whole vocabulary"),
    "top_k": ((0, None), "the learner's log-probs are of the whole vocabulary"),
    "min_p": ((None, 0.0), "the learner's log-probs are of the whole vocabulary"),
    "repetition_penalty": ((1.0,), "the learner's log-probs have no penalty"),
    "generation_kwargs": ((None, {}), "the sampler takes temperature and max_completion_length only"),
}
"""Options of TRL that the rollout cannot follow: values that change nothing, and the reason."""


@dataclass
class EvictingGRPOConfig(GRPOConfig):  # type: ignore[misc]
    """TRL's GRPOConfig, with the KV cache of rollouts, the correction and the distillation.

    Args:
        cache_policy: eviction policy, one of `lit_rlkv.kvcache.POLICIES`, or "dense" to evict nothing.
        cache_budget: keys left after a compaction, for each sequence, layer and KV head.
        cache_interval: tokens decoded between two compactions.
        cache_sink: first tokens of a sequence that are never evicted.
        cache_window: latest tokens that are never evicted.
        correction: "shadow": the learner replays the evictions of the rollout. Otherwise it sees every key,
            without a correction ("naive"), or with TRL's per-token loss times the importance weight min(ρ, 2)
            ("tis") or ρ inside [0.5, 2] and 0 outside ("mis"), ρ = π_old / sampler.
        distillation: "dense_student" adds KL(π_dense ‖ sg π_shadow) to the loss, "sparse_student"
            KL(sg reference_dense ‖ π_shadow), over the whole vocabulary (arXiv:2605.06850); "none": neither.
        distillation_weight: weight of the KL, in nats per completion token.

    Raises:
        ValueError: a field is invalid, or an option of TRL asks for what the rollout cannot do.
    """

    cache_policy: str = field(default="snapkv", metadata={"help": "Eviction policy; dense evicts nothing."})
    cache_budget: int = field(default=512, metadata={"help": "Keys left after a compaction."})
    cache_interval: int = field(default=128, metadata={"help": "Tokens decoded between two compactions."})
    cache_sink: int = field(default=4, metadata={"help": "First tokens that are never evicted."})
    cache_window: int = field(default=16, metadata={"help": "Latest tokens that are never evicted."})
    correction: str = field(default="shadow", metadata={"help": "One of shadow, naive, tis, mis."})
    distillation: str = field(
        default="none", metadata={"help": "One of none, dense_student, sparse_student."}
    )
    distillation_weight: float = field(default=0.1, metadata={"help": "Weight of the distillation's KL."})

    def __post_init__(self) -> None:
        self.cache_spec()
        if self.correction == "sparse_rl":
            raise ValueError(
                "correction='sparse_rl' counts fewer tokens in the loss's denominator, which TRL's losses do "
                "not take; choose one of shadow, naive, tis, mis"
            )
        for name, known in (("correction", tuple(CORRECTIONS)), ("distillation", DISTILLATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}; choose one"
                )
        if not (is_number(self.distillation_weight) and 0 < self.distillation_weight < math.inf):
            raise ValueError(
                f"distillation_weight must be a number above 0, got {self.distillation_weight!r}; raise it, "
                "or set distillation='none'"
            )
        for name, (neutral, reason) in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise ValueError(
                    f"{name} must be {neutral[0]}, got {getattr(self, name)!r}: {reason}; leave it out"
                )
        check_temperature("temperature", self.temperature, is_greedy_allowed=False)
        super().__post_init__()

    def cache_spec(self) -> CacheSpec:
        """Return the cache of rollouts."""
        return CacheSpec(
            policy=self.cache_policy,
            budget=self.cache_budget,
            interval=self.cache_interval,
            sink=self.cache_sink,
            window=self.cache_window,
        )


class EvictingGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose rollouts evict keys, and whose learner replays the evictions.

    Arguments are those of `GRPOTrainer`, with an `EvictingGRPOConfig` as `args`. Metrics are TRL's, and

    - `kv/replay_gap`: the largest |log π − log sampler| of a completion token before the first update on a
      rollout, in nats; with a correction other than "shadow" it is the mismatch of the dense learner;
    - `kv/bytes`: allocated keys and values, summed over processes;
    - `smd/kl`: the KL of the distillation, mean over completion tokens, in nats.

    Dropout is set to 0, because sampler and learner must compute the same function.

    Raises:
        TypeError: `args` is not an `EvictingGRPOConfig`.
        ValueError: the model cannot be replayed, or an argument asks for what the rollout cannot do.
    """

    def __init__(
        self,
        model: "str | PreTrainedModel | Any",
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        **arguments: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = EvictingGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        _check_arguments(model, args, arguments)
        if isinstance(model, str):
            options = dict(args.model_init_kwargs or {})
            args.model_init_kwargs = {**options, "attn_implementation": ATTENTION_NAME}
        else:
            prepare_backbone(_causal_lm(model))  # before TRL copies its attention for the reference
        self._spec = args.cache_spec()
        self._replays = args.correction == "shadow"
        self._weight_fn = CORRECTIONS[args.correction]
        self._evicted_at: Tensor | None = None
        self._learner_logps: Tensor | None = None
        super().__init__(model, reward_funcs, args, **arguments)
        prepare_backbone(_causal_lm(self.model))
        if self.is_fsdp_enabled or self._dist.is_zero3:
            raise ValueError(
                "EvictingGRPOTrainer must have the whole weights on each process, and FSDP and DeepSpeed "
                "ZeRO-3 shard them; use DDP, or lit_rlkv.fit, which shards by FSDP2"
            )
        if args.distillation == "sparse_student" and self.ref_model is None and not _has_adapter(self.model):
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
        """Sample a completion for each prompt under the evicting cache; equal neighbours share a prefill."""
        n = math.gcd(*(len(list(run)) for _, run in groupby(prompt_ids)))
        prompts = [torch.tensor(ids) for ids in prompt_ids[::n]]
        options = {"padding_side": "left", "pad_to_multiple_of": self.pad_to_multiple_of}
        device = self.accelerator.device
        with (
            profiling_context(self, "lit_rlkv.generate"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self.accelerator.autocast(),
        ):
            rollout = generate(
                _causal_lm(model),
                pad(prompts, padding_value=self._tokenizer.pad_token_id, **options).to(device),
                pad([torch.ones_like(ids) for ids in prompts], padding_value=0, **options).to(device),
                cache=self._spec,
                max_new_tokens=self.max_completion_length,
                eos_token_id=self.eos_token_ids,
                pad_token_id=self._tokenizer.pad_token_id,
                temperature=self.temperature,
                num_return_sequences=n,
            )
        self._evicted_at = replay_evicted_at(rollout)
        n_bytes = self.accelerator.reduce(torch.tensor(rollout.kv_bytes, device=device))
        self._metrics[self._mode]["kv/bytes"].append(n_bytes.item())
        rows = list(zip(rollout.input_ids, rollout.rollout_logps, rollout.response_mask, strict=True))
        return [ids[mask].tolist() for ids, _, mask in rows], [
            logps[mask].tolist() for _, logps, mask in rows
        ]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Add the eviction table to TRL's batch, and the importance weights to its advantages."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        input_ids, attention_mask, n_completion = _whole_rows(output)
        output["evicted_at"] = _pad_columns(self._evicted_at, input_ids)
        output["sampled_at_step"] = torch.tensor(self.state.global_step)
        if self._weight_fn is unweighted:
            return output
        old_logps = output.get("old_per_token_logps")
        if old_logps is None:
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
        """Return TRL's log-probs, entropies and auxiliary loss under the learner's view of the keys."""
        evicted_at = self._view(input_ids, attention_mask, shadow=self._replays)
        positions = token_positions(attention_mask)
        batch_size = batch_size or len(input_ids)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(input_ids), batch_size):
            rows = slice(start, start + batch_size)
            changed = _attention_arguments(model, evicted_at[rows])
            changed["position_ids"] = positions[rows]
            if (
                not compute_aux_loss
            ):  # which reads the real mask; otherwise transformers builds none of its own
                changed["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
            part = super()._get_per_token_logps_and_entropies(
                partial(_call_with, model, changed),
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

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's loss under replay, with the distillation's."""
        self._evicted_at = inputs["evicted_at"]
        decoder = _causal_lm(self.accelerator.unwrap_model(model)).base_model
        with _keep_output(decoder) as outputs:
            loss: Tensor = super()._compute_loss(model, inputs)
        if self.state.global_step == inputs["sampled_at_step"]:  # no update since the rollout
            self._log_gap(inputs)
        if self.args.distillation != "none":
            loss = loss + self._distillation_loss(outputs[-1], inputs)
        return loss

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _view(self, input_ids: Tensor, attention_mask: Tensor, *, shadow: bool) -> Tensor:
        """Return the eviction table of the batch at hand, or that of a dense cache."""
        if shadow:
            return _pad_columns(self._evicted_at, input_ids)
        return dense_evicted_at(attention_mask.bool())

    @torch.no_grad()
    def _log_gap(self, inputs: dict[str, Any]) -> None:
        assert self._learner_logps is not None
        gap = (self._learner_logps - inputs["sampling_per_token_logps"]).abs()
        gap = gap.masked_fill(~inputs["completion_mask"].bool(), 0.0)
        largest = self.accelerator.gather(gap.max()).max().item()
        metrics = self._metrics[self._mode]  # TRL logs means of lists, and this is a maximum
        metrics["kv/replay_gap"] = [max([largest, *metrics["kv/replay_gap"]])]

    def _distillation_loss(self, policy_output: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return weight · KL, averaged over the completion tokens of the optimizer step."""
        input_ids, attention_mask, n_completion = _whole_rows(inputs)
        is_read = torch.zeros_like(attention_mask[:, 1:], dtype=torch.bool)
        is_read[:, -n_completion:] = inputs["completion_mask"].bool()
        policy = self.accelerator.unwrap_model(self.model)

        def states(model: Any, *, shadow: bool) -> Tensor:
            evicted_at = self._view(input_ids, attention_mask, shadow=shadow)
            with self.accelerator.autocast():
                hidden = hidden_states(
                    _causal_lm(model), input_ids, token_positions(attention_mask), evicted_at=evicted_at
                )
            return hidden[:, :-1][is_read]

        def policy_states(*, shadow: bool, trains: bool) -> Tensor:
            if shadow == self._replays:
                hidden = policy_output[:, :-1][is_read]
                return hidden if trains else hidden.detach()
            with nullcontext() if trains else torch.no_grad():
                return states(policy, shadow=shadow)

        to_sparse = self.args.distillation == "sparse_student"
        student = policy_states(shadow=to_sparse, trains=True)
        if to_sparse:
            teacher_model = (
                policy if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
            )
            with torch.no_grad(), _as_reference(teacher_model) if self.ref_model is None else nullcontext():
                teacher = states(teacher_model, shadow=False)
        else:
            teacher_model = policy
            teacher = policy_states(shadow=True, trains=False)
        backbone = _causal_lm(policy)
        with self.accelerator.autocast():
            kl_sum = distillation_kl(
                teacher,
                student,
                partial(head_logits, _causal_lm(teacher_model)),
                partial(head_logits, backbone),
                self.temperature,
                text_config(backbone).vocab_size,
                1,
                reverse=not to_sparse,
                heads_are_frozen=head_is_frozen(backbone),
            )
        totals = self.accelerator.reduce(torch.stack([kl_sum.detach(), is_read.sum()]))
        self._metrics[self._mode]["smd/kl"].append((totals[0] / totals[1].clamp(min=1)).item())
        # TRL counts the tokens of the rollout; gradients are averaged over processes.
        n_tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self._mode == "train":
            n_tokens = n_tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return self.args.distillation_weight * kl_sum / n_tokens


def _check_arguments(model: Any, args: Any, arguments: dict[str, Any]) -> None:
    if not isinstance(args, EvictingGRPOConfig):
        raise TypeError(
            f"args must be an EvictingGRPOConfig, got {type(args).__name__}; it takes the same fields"
        )
    refused = {
        "tools": "a tool's answer enters the context between turns, and the record of evictions has one turn",
        "environment_factory": "its tools add turns, and the record of evictions has one turn",
        "rollout_func": "the rollout is this trainer's own",
    }
    for name, reason in refused.items():
        if arguments.get(name):
            raise ValueError(f"{name} must be left out of EvictingGRPOTrainer: {reason}; use GRPOTrainer")
    if isinstance(arguments.get("processing_class"), ProcessorMixin):
        raise ValueError("images cannot be replayed: processing_class must be a tokenizer, got a processor")
    given = (args.model_init_kwargs or {}).get("attn_implementation", ATTENTION_NAME)
    if given != ATTENTION_NAME:
        raise ValueError(
            f"model_init_kwargs must leave attn_implementation out, got {given!r}; replay has its own"
        )
    configs = [arguments.get("peft_config"), *getattr(model, "peft_config", {}).values()]
    if any(getattr(config, "is_prompt_learning", False) for config in configs):
        raise ValueError(
            "prompt learning adds virtual tokens, which the record of evictions does not cover; use LoRA or "
            "another adapter of peft"
        )


def _has_adapter(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _causal_lm(model: Any) -> PreTrainedModel:
    """Return the transformers model, with the adapters that peft injected."""
    return model.get_base_model() if _has_adapter(model) else model


def _as_reference(model: Any) -> Any:
    """Switch to the reference within a block, as TRL does: its copy of a trained adapter, or no adapter."""
    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


def _call_with(model: Any, changed: dict[str, Any], **inputs: Any) -> Any:
    return model(**inputs | changed)


def _attention_arguments(model: Any, evicted_at: Tensor) -> dict[str, Any]:
    """Return what replay passes through the model to its attention."""
    if not uses_triton(next(model.parameters())):
        return {"evicted_at": evicted_at}
    return {"evicted_at": evicted_at, "plan": plan_slots(evicted_at)}


def _whole_rows(batch: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return the tokens of TRL's batch, their mask, and the columns of completions."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return input_ids, attention_mask, batch["completion_ids"].shape[1]


def _pad_columns(evicted_at: Tensor | None, input_ids: Tensor) -> Tensor:
    """Return the table with the columns of TRL's padding, whose keys no query sees."""
    assert evicted_at is not None
    assert len(evicted_at) == len(input_ids)
    return F.pad(evicted_at, (0, input_ids.shape[1] - evicted_at.shape[-1]))


@contextmanager
def _keep_output(decoder: Any) -> Iterator[list[Tensor]]:
    """Collect the last hidden states of each forward of the block."""
    outputs: list[Tensor] = []
    handle = decoder.register_forward_hook(
        lambda module, args, output: outputs.append(output.last_hidden_state)
    )
    try:
        yield outputs
    finally:
        handle.remove()
