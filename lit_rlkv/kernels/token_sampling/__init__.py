"""Token sampling: a token from softmax(logits / temperature), its log-prob, and the entropy."""

from types import ModuleType

from lit_rlkv.kernels.backend import with_triton
from lit_rlkv.kernels.token_sampling import reference
from lit_rlkv.kernels.token_sampling.reference import NoiseRows

__all__ = ["NoiseRows", "sample_tokens", "sample_tokens_and_entropy"]


def _load_kernels() -> ModuleType:
    from lit_rlkv.kernels.token_sampling import kernel

    return kernel


sample_tokens = with_triton(reference.sample_tokens, _load_kernels, chosen_by="logits")
sample_tokens_and_entropy = with_triton(
    reference.sample_tokens_and_entropy, _load_kernels, chosen_by="logits"
)
