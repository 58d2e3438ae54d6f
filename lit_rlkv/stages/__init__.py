"""The stages of a run: sft, rl, evaluation, and export of a finished one."""
