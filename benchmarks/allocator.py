"""Let CUDA memory grow in place; imported before torch, which reads the setting.

A cache that grows by a token a step leaves holes that no later tensor fits into; such segments have none.
"""

import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
