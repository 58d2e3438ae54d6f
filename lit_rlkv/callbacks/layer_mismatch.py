"""Which layer's eviction moves the policy: each layer's evictions replayed alone."""

import torch

from lit_rlkv.callbacks.diagnostic import RowsDiagnostic
from lit_rlkv.diagnostics.views import in_passes, layer_kls, nothing_died, spread_rows
from lit_rlkv.experience.batch import Experience
from lit_rlkv.models.hydra import acting_as


class LayerMismatch(RowsDiagnostic):
    """KL of the policy with one layer's evictions from the dense policy, layer by layer.

    It costs n_layers + 2 forwards of the responses it looks at. Where nothing was evicted all of them are 0,
    and no forward is run. Responses are chosen from those of all ranks.
    """

    name = "layers"

    def measure(self, experience: Experience) -> None:
        rollout, ranks = experience.rollout, experience.ranks
        some = rollout.rows(spread_rows(rollout, self.n_rows, ranks))
        kls = torch.zeros(
            rollout.evicted_at.shape[1] + 1, dtype=torch.float64, device=rollout.evicted_at.device
        )
        if not nothing_died(some):
            with acting_as(self.policy.roles, "policy") as backbone:
                for part in in_passes(some, self.rows_per_pass):
                    kls += layer_kls(backbone, part, self.policy.temperature).double().sum(dim=1)
        *alone, together = (ranks.total(kls) / ranks.total(some.response_mask.sum())).tolist()
        self.scalars = {f"kv/layer_kl/{layer}": value for layer, value in enumerate(alone)}
        self.scalars["kv/layer_kl/all"] = together
        self.arrays = {"layer_kl": alone, "all_layers_kl": together}
