"""Reporting: progress, samples, tables, figures, the HTML report, loggers."""
