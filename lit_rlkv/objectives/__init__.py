"""Losses as pure functions of tensors and global counts."""
