"""Sweeps without an account: W&B's sweep files, run by processes on this machine and kept by Optuna."""
