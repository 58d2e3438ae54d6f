"""How good a policy is: accuracy by cache, pass@k with intervals, and the quality of a reward model."""
