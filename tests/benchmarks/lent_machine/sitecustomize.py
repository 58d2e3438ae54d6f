"""With this folder in PYTHONPATH, Python starts as on a machine that lacks the packages below.

The project itself is not installed there either, but found on the path.
"""

import os
import sys
from importlib.metadata import DistributionFinder

ABSENT = {
    "beartype",
    "hydra",
    "hydra-core",
    "lightning",
    "lightning-utilities",
    "lit-rlkv",
    "matplotlib",
    "omegaconf",
    "peft",
    "pytorch-lightning",
    "rich",
    "torchmetrics",
    "wandb",
}
KEPT_MODULES = {"lit_rlkv"}
"""Found on the path, though not installed."""


class Without:
    """A finder that finds what another one does, without the packages above."""

    def __init__(self, finder) -> None:
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top.replace("_", "-") in ABSENT and top not in KEPT_MODULES:
            return None
        return self.finder.find_spec(name, path, target)

    def find_distributions(self, context=None):
        if not hasattr(self.finder, "find_distributions"):
            return
        for found in self.finder.find_distributions(context or DistributionFinder.Context()):
            if found.metadata["Name"].lower().replace("_", "-") not in ABSENT:
                yield found

    def invalidate_caches(self) -> None:
        if hasattr(self.finder, "invalidate_caches"):
            self.finder.invalidate_caches()


if os.environ.get("ABSENT_PACKAGES") != "":
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
