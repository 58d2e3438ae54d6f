"""Each looks at what a rollout or an update did, at its own interval, and says what looking cost."""
