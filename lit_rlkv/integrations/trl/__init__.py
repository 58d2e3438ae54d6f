"""TRL's GRPOTrainer and RLOOTrainer with rollouts under a KV cache of fixed size, replayed exactly.

    from lit_rlkv.integrations.trl import EvictingGRPOConfig, EvictingGRPOTrainer

Data, rewards, advantages, losses, logs and checkpoints are TRL's.
"""

from lit_rlkv.integrations.trl.release import check_trl_version

check_trl_version()  # before anything of TRL is imported, whose own errors would be less clear

from lit_rlkv.integrations.trl.config import EvictingGRPOConfig, EvictingRLOOConfig  # noqa: E402
from lit_rlkv.integrations.trl.grpo import EvictingGRPOTrainer  # noqa: E402
from lit_rlkv.integrations.trl.rloo import EvictingRLOOTrainer  # noqa: E402

__all__ = ["EvictingGRPOConfig", "EvictingGRPOTrainer", "EvictingRLOOConfig", "EvictingRLOOTrainer"]
