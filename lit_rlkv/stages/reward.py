"""Score a reward head on held-out preference pairs."""

from pathlib import Path
from random import Random

from transformers import PreTrainedModel

from lit_rlkv.callbacks.progress import track
from lit_rlkv.config import as_config_errors
from lit_rlkv.data.pairs import preference_pair
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.reward_evaluation import RewardReport, score_pairs
from lit_rlkv.models.adapters import lora_layers, switched
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.hydra import Roles, acting_as, make_head
from lit_rlkv.rng import derive_seed
from lit_rlkv.stages.parts import Parts, load_backbone
from lit_rlkv.stages.sharding import shard
from lit_rlkv.stages.warmup import critic_folder, load_reward_head
from lit_rlkv.types import PreferencePair


def held_out_pairs(parts: Parts) -> list[PreferencePair]:
    """Pairs of the eval split, `evaluation.n_prompts` of them or as many as it has."""
    cfg = parts.cfg
    rng = Random(derive_seed(cfg.seed, "corrupt", "eval"))
    with as_config_errors("task"):
        source = PromptSource(parts.task, split="eval", seed=cfg.seed)
        n_pairs = min(cfg.evaluation.n_prompts, source.size or cfg.evaluation.n_prompts)
        return [preference_pair(parts.task, problem, rng) for problem in source.take(n_pairs)]


def report_on_reward(parts: Parts, roles: Roles, start: str | Path) -> RewardReport | None:
    """What the reward head of a warm model is worth, whether or not this run asks for its opinion.

    None where there is no such head. To be asked before training.
    """
    folder = critic_folder(start)
    weights = load_reward_head(folder)
    if weights is None:
        return None
    if "reward" in roles.needed:
        with acting_as(roles, "reward") as backbone:
            return evaluate_reward(parts, backbone, roles.head("reward"))
    # Before training the policy's backbone holds the warm weights, so that no copy of them is needed.
    if folder == start:
        backbone = roles.backbone("policy")
    else:
        backbone = load_backbone(parts, folder)
        shard(parts, backbone)
    with switched(lora_layers(backbone), None):
        return evaluate_reward(parts, backbone, make_head(backbone, weights))


def evaluate_reward(parts: Parts, backbone: PreTrainedModel, head: ScalarHead) -> RewardReport:
    """What the head makes of held-out pairs, on the backbone in whatever role it has now."""
    pairs = held_out_pairs(parts)
    batch_size = parts.cfg.evaluation.batch_size
    with track("reward", len(pairs)) as advance, parts.fabric.autocast():
        return score_pairs(backbone, head, parts.tokenizer, pairs, batch_size, on_scored=advance)
