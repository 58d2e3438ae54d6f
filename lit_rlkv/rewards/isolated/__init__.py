"""Code that runs in separate processes and imports nothing of this package: worker and functions."""

from pathlib import Path

FOLDER = Path(__file__).parent
