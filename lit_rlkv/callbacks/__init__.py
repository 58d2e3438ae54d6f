"""Callbacks: what rides on the training loop without being in it."""
