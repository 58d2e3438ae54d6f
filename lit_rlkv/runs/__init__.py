"""A run on disk and on processes: context, folder and lock, checkpoints, resume, signals, launch."""
