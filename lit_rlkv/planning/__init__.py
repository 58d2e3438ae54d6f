"""The plan of a run before any work: bytes and seconds of rollout and update on a card."""
