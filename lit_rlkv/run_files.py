"""Names of the files and folders in a run folder."""

CONFIG, ENVIRONMENT, EVALUATION = "config.yaml", "environment.json", "evaluation.json"
CHOICES = "choices.json"
METRICS, SFT_METRICS, DIAGNOSTICS = "metrics.csv", "sft_metrics.csv", "diagnostics.jsonl"
SAMPLES, EVICTIONS = "samples.jsonl", "evictions.json"
BACKBONE, CHECKPOINTS = "backbone", "checkpoints"
REPORT = "report.html"
"""Written last: a run with a report is complete."""
