"""A run on disk and on processes: the run, its folder and lock, checkpoints, resume, signals, launch."""
