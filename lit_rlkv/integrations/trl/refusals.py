"""Arguments and options that a trainer of TRL takes, and one that evicts and replays must refuse."""

from typing import Any

from transformers import GenerationConfig, ProcessorMixin

from lit_rlkv.models.attention import ATTENTION_NAME
from lit_rlkv.settings import SAMPLING

_OF_THE_TRAINER = {"do_sample", *SAMPLING, "repetition_penalty"} | {
    f"{name}_token_id" for name in ("bos", "eos", "pad")
}
"""Options of a generation config that TRL's own or the tokenizer's take the place of."""
_WITHOUT_EFFECT = {"max_length", "max_new_tokens", "use_cache", "transformers_version", "_from_model_config"}
_AT_ONE = {"typical_p", "num_beams", "num_beam_groups", "guidance_scale", "num_return_sequences"}
"""Options that change nothing at 1; the others change nothing at 0."""


def check_arguments(trainer: Any, model: Any, args: Any, arguments: dict[str, Any]) -> None:
    """Refuse arguments of a trainer that its rollout or its learner cannot follow."""
    is_ours = isinstance(args, trainer.config_class)
    if not is_ours:
        raise TypeError(
            f"args must be an {trainer.config_class.__name__}, got {type(args).__name__}; it takes the same "
            "fields"
        )
    has_tools = arguments.get("tools") or arguments.get("environment_factory")
    if trainer.algorithm != "GRPO" and has_tools:
        raise ValueError(
            f"tools and environment_factory must be left out of {trainer.__name__}: TRL's "
            f"{trainer.algorithm}Trainer has none; use EvictingGRPOTrainer"
        )
    if arguments.get("rollout_func") and has_tools:
        raise ValueError(
            "tools and environment_factory must be left out beside a rollout_func, whose engine samples "
            "every turn; call tools in it, and return their tokens with 0 in env_mask"
        )
    refuse_processor(arguments.get("processing_class"))
    given = (args.model_init_kwargs or {}).get("attn_implementation", ATTENTION_NAME)
    if given != ATTENTION_NAME:
        raise ValueError(
            f"model_init_kwargs must leave attn_implementation out, got {given!r}; replay has its own"
        )
    if args.replay_routing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "replay_routing=True must recompute layers with their experts, which use_reentrant=True in "
            "gradient_checkpointing_kwargs does not allow; leave it out"
        )
    configs = [arguments.get("peft_config"), *getattr(model, "peft_config", {}).values()]
    if any(getattr(config, "is_prompt_learning", False) for config in configs):
        raise ValueError(
            "prompt learning adds virtual tokens, which the record of evictions does not cover; use LoRA "
            "or another adapter of peft"
        )


def refuse_generation_options(config: GenerationConfig) -> None:
    """Refuse what a model's generation config asks of rollouts, and TRL does, but the sampler does not."""
    asked = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in _OF_THE_TRAINER | _WITHOUT_EFFECT and (value != 1 if name in _AT_ONE else value)
    }
    if asked:
        given = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise ValueError(
            f"the model's generation_config sets {given}, which the learner cannot replay; set "
            f"{' and '.join(f'model.generation_config.{name} = None' for name in asked)}"
        )


def refuse_processor(processing_class: Any) -> None:
    """Refuse a processor, whose images the rollout would leave out of the prompt."""
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            "images cannot be replayed: processing_class must be a tokenizer, got a processor; for a model "
            "that also reads images pass processing_class=AutoTokenizer.from_pretrained(...)"
        )
