"""What people see of a run: progress, samples, plots, the HTML report, loggers."""
