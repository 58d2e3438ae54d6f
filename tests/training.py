"""A toy run put together by hand, for tests of the loop, the modules and the callbacks."""

import torch
from transformers import PreTrainedModel

from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.rollouts import RolloutDataModule, SamplingConfig, UpdateConfig
from lit_rlkv.data.tasks import ChainSum
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.hydra import add_policy_adapter
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.modules.grpo import GRPO
from lit_rlkv.objectives.corrections import Correction, unweighted

SPEC = CacheSpec(policy="random", budget=7, interval=2, sink=1, window=2)
REPLAY = Correction(samples_dense=False, replays=True, weigh=unweighted)


class DigitsAreGood(ChainSum):
    """An untrained model scores here now and then: any completion that starts with a digit is right."""

    def score(self, problem, completion):
        return float(completion[:1].isdigit())


def make_backbone(seed: int = 0, **size: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 8, "intermediate_size": 32} | size
    model = tiny_qwen3(51, 0, 1, **shape)
    # Sharper than at initialisation, so that what eviction hides makes a difference.
    for parameter in model.parameters():
        parameter.data.mul_(4.0) if parameter.ndim == 2 else None
    return add_policy_adapter(prepare_backbone(model), rank=4, alpha=8, target_modules="all-linear")


def make_module(backbone: PreTrainedModel, replays: bool = True, **options: float) -> GRPO:
    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2)

    options = {"clip_low": 0.2, "clip_high": 0.2} | options
    return GRPO(backbone, make_optimizer, replays=replays, temperature=1.0, **options)


def make_datamodule(
    backbone: PreTrainedModel,
    correction: Correction = REPLAY,
    spec: CacheSpec = SPEC,
    seed: int = 0,
    **update,
) -> RolloutDataModule:
    task = DigitsAreGood(n_terms=3)
    update = {"advantage": "grpo", "aggregation": "sequence"} | update
    return RolloutDataModule(
        backbone,
        build_task_tokenizer(),
        task,
        PromptSource(task, split="train", seed=seed),
        spec,
        correction,
        SamplingConfig(n_prompts=4, group_size=4, max_new_tokens=10, temperature=1.0),
        UpdateConfig(**update),
        seed=seed,
    )
