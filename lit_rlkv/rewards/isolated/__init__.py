"""Programs that run in processes of their own and import nothing of this package."""

from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
MATHEMATICS = Path(__file__).with_name("mathematics.py")
TEMPLATE = Path(__file__).with_name("template.py")
