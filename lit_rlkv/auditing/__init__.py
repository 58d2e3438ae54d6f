"""An audit of another trainer's log: how far its sampler is from the learner, and why."""
