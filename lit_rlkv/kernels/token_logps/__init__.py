"""Log-probs of chosen tokens and KL of two policies, without the logits of a whole batch."""

from lit_rlkv.kernels.token_logps.reference import Head, policy_kl, token_logps

__all__ = ["Head", "policy_kl", "token_logps"]
