"""Tiny random models of every supported family, prepared and cached, and ragged prompts to run them on."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lit_rlkv.kvcache.policies import Learned
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.kv_scorer import add_kv_scorer

VOCAB, HIDDEN, HEADS, HEAD_DIM, LAYERS = 64, 32, 4, 8, 3
PAD = 0
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": PAD,
}
"""Of a model whose config class is none of `FAMILIES`."""

WEIGHT_SCALE = 4.0
"""Factor on the initial matrices; at their small scale attention is uniform and hides a wrong mask."""

FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "gpt_neox": GPTNeoXConfig,
    "gpt2": GPT2Config,  # the one with learned positions, which a shift of a whole row does not leave alone
    # The logits of this model reach 0.2, because a query_pre_attn_scalar of 256 divides them by 16.
    "gemma2": partial(Gemma2Config, attn_logit_softcapping=0.05),
    "gemma3": Gemma3TextConfig,
}

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# The first layer of both is dense; a token's 2 experts are of 2 of the 4 groups.
DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4} | LATENT
MOE_FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "mixtral": partial(MixtralConfig, num_local_experts=8),
    "qwen2_moe": partial(Qwen2MoeConfig, num_experts=8, shared_expert_intermediate_size=16),
    "qwen3_moe": partial(Qwen3MoeConfig, num_experts=8, norm_topk_prob=True),
    "olmoe": partial(OlmoeConfig, num_experts=8),
    "granitemoe": partial(GraniteMoeConfig, num_local_experts=8),
    "deepseek_v2": partial(DeepseekV2Config, topk_method="group_limited_greedy", topk_group=2, **DEEPSEEK),
    "deepseek_v3": partial(DeepseekV3Config, topk_group=2, **DEEPSEEK),
}
"""Mixtures of 8 experts, of which each token takes 2."""


def tiny_config(family: str, n_kv_heads: int = 2, **changes: object) -> PretrainedConfig:
    """A config of that family; the GPTs have no grouped queries and ignore `n_kv_heads`."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family not in ("gpt_neox", "gpt2"):
        settings["num_key_value_heads"] = n_kv_heads
    if family in ("qwen3", "gemma2", "gemma3", "qwen3_moe"):
        settings["head_dim"] = HEAD_DIM
    if family in ("deepseek_v2", "deepseek_v3"):  # whose heads read one latent
        settings["num_key_value_heads"] = HEADS
    if family in MOE_FAMILIES:
        settings |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return (FAMILIES | MOE_FAMILIES)[family](**{**settings, **changes})


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A random model of that config in evaluation mode, not yet prepared, the same at every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(WEIGHT_SCALE)
    return model


def tiny_model(family: str = "llama", n_kv_heads: int = 2) -> PreTrainedModel:
    """The prepared model with a scorer; shared by all tests, which must leave it as it was."""
    return _tiny_model(family, n_kv_heads)


@cache
def _tiny_model(family: str, n_kv_heads: int) -> PreTrainedModel:
    return with_scorer(prepare_backbone(build(tiny_config(family, n_kv_heads))))


def with_scorer(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with random scores of its keys, for the policy `learned`."""
    scorer = add_kv_scorer(model, Learned()).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in scorer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def ragged_prompts(lens: tuple[int, ...] = (14, 9, 4, 1)) -> tuple[Tensor, Tensor]:
    """Return left-padded random prompts of these lengths, and their attention mask."""
    generator = torch.Generator().manual_seed(7)
    width = max(lens)
    attention_mask = torch.arange(width) >= width - torch.tensor(lens)[:, None]
    input_ids = torch.randint(1, VOCAB, (len(lens), width), generator=generator)
    return input_ids.masked_fill(~attention_mask, PAD), attention_mask


def own_logps(model, rollout):
    """Log-probs of the responses by transformers' own attention and masks."""
    model.set_attn_implementation("eager")
    mask = rollout.attention_mask.long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(rollout.input_ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
    logps = logits.float().log_softmax(-1).gather(2, rollout.input_ids[:, 1:, None])[..., 0]
    return torch.where(rollout.response_mask[:, 1:], logps, 0.0)
