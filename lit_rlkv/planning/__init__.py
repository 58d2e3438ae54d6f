"""The plan of a run before any work: bytes and seconds of its rollout and update on a card, from a config alone."""
