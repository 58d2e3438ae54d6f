"""Evaluation: accuracy by cache, pass@k with intervals, quality of a reward model."""
