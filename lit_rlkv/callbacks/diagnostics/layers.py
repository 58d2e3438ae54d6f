"""Which layer's eviction moves the policy: each layer's deaths replayed alone."""

import torch

from lit_rlkv.callbacks.diagnostics.base import RowsDiagnostic
from lit_rlkv.data.credit import Experience
from lit_rlkv.diagnostics.views import in_passes, layer_kls, nothing_died, spread_rows
from lit_rlkv.models.hydra import acting_as


class LayerMismatch(RowsDiagnostic):
    """KL of the policy with one layer's evictions from the dense policy, layer by layer.

    It costs n_layers + 2 forwards of the responses it looks at. Where nothing was evicted all of them are 0,
    and no forward is run.
    """

    name = "layers"

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
