"""Callbacks of the training loop: shadow distillation, reference sync and diagnostics."""
