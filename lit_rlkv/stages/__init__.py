"""The stages of a run, each a function of its config: warm up, train by RL, evaluate."""
