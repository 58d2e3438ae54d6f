"""What runs in processes of its own and imports nothing of this package: the worker and its functions."""

from pathlib import Path

FOLDER = Path(__file__).parent
