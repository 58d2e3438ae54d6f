"""Diagnostics: pure statistics of rollouts, gradients and caches; callbacks decide when they are taken."""
