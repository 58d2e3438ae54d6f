"""Callbacks of the training loop: shadow distillation and diagnostics."""
