"""Log-probability of the survivors of an eviction that draws them by Gumbel top-k."""

from lit_rlkv.kernels.set_logps.quadrature import set_logps

__all__ = ["set_logps"]
