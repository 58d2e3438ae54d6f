"""Which layer's eviction moves the policy: each layer's deaths replayed alone."""

import torch

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.data.credit import Experience
from lit_rlkv.diagnostics.views import check_rows, in_passes, layer_kls, nothing_died, spread_rows
from lit_rlkv.models.hydra import acting_as


class LayerMismatch(Diagnostic):
    """KL of the policy with one layer's evictions from the dense policy, layer by layer.

    Where nothing was evicted all of them are 0, and no forward is run.

    Args:
        n_rows: responses that it looks at, at the cost of n_layers + 2 forwards of them.
        rows_per_pass: most responses in one forward; None takes what makes up 65,536 tokens.
    """

    name = "layers"

    def __init__(self, every: int = 1, n_rows: int = 8, rows_per_pass: int | None = None) -> None:
        super().__init__(every)
        check_rows(self.name, n_rows, rows_per_pass)
        self.n_rows = n_rows
        self.rows_per_pass = rows_per_pass

    def measure(self, experience: Experience) -> None:
        rollout = experience.rollout
        if nothing_died(rollout):
            self._report([0.0] * rollout.death.shape[1], 0.0)
            return
        some = rollout.rows(spread_rows(rollout, self.n_rows))
        with acting_as(self.policy.roles, "policy") as backbone:
            parts = [
                layer_kls(backbone, part, self.policy.temperature)
                for part in in_passes(some, self.rows_per_pass)
            ]
        *alone, together = torch.cat(parts, dim=1).mean(dim=1).tolist()
        self._report(alone, together)

    def _report(self, alone: list[float], together: float) -> None:
        self.scalars = {f"kv/layer_kl/{layer}": value for layer, value in enumerate(alone)}
        self.scalars["kv/layer_kl/all"] = together
        self.arrays = {"layer_kl": alone, "all_layers_kl": together}
