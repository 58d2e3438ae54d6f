"""EvictingRLOOTrainer: TRL's RLOOTrainer with evicting rollouts and exact replay."""

from typing import Any

from trl import RLOOTrainer

from lit_rlkv.integrations.trl.config import EvictingRLOOConfig
from lit_rlkv.integrations.trl.replaying import EvictingTrainer


class EvictingRLOOTrainer(EvictingTrainer, RLOOTrainer):  # type: ignore[misc]
    """RLOOTrainer whose rollouts evict keys, and whose learner replays the evictions.

    Arguments are those of `RLOOTrainer`, with an `EvictingRLOOConfig` as `args`. Metrics are TRL's, with
    `kv/replay_gap` and `kv/bytes` as in `EvictingGRPOTrainer`. Dropout is set to 0.

    Raises:
        TypeError: `args` is not an `EvictingRLOOConfig`.
        ValueError: the model cannot be replayed, or an argument asks for what the rollout cannot do.
    """

    config_class = EvictingRLOOConfig
    algorithm = "RLOO"

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any
    ) -> list[list[int]]:
        completion_ids, _ = self.sample(prompt_ids)
        return completion_ids
