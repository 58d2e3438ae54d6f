"""Sweeps without an account: W&B's sweep files, drawn by Optuna and run by processes on this machine."""
