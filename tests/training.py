"""A toy run put together by hand, for tests of the loop, the modules and the callbacks."""

import torch
from transformers import PreTrainedModel

from lit_rlkv.data.credit import CreditRule, GroupCredit
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.rollouts import KLConfig, RolloutDataModule, SamplingConfig, UpdateConfig
from lit_rlkv.data.tasks import ChainSum
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.hydra import LoraSpec, Roles
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.modules.grpo import GRPO
from lit_rlkv.objectives.corrections import Correction, unweighted

SPEC = CacheSpec(policy="random", budget=7, interval=2, sink=1, window=2)
REPLAY = Correction(samples_dense=False, replays=True, weigh=unweighted)
LORA = LoraSpec(rank=4, alpha=8, target_modules="all-linear")
TRAINED_HEAD = {"linear.weight": torch.linspace(-1, 1, 32)[None], "linear.bias": torch.tensor([0.3])}
"""A reward head that has an opinion."""


class DigitsAreGood(ChainSum):
    """An untrained model scores here now and then: any completion that starts with a digit is right."""

    def score(self, problem, completion):
        return float(completion[:1].isdigit())


def make_model(seed: int = 0, **size: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 8, "intermediate_size": 32} | size
    model = tiny_qwen3(51, 0, 1, **shape)
    # Sharper than at initialisation, so that what eviction hides makes a difference.
    for parameter in model.parameters():
        parameter.data.mul_(4.0) if parameter.ndim == 2 else None
    return prepare_backbone(model)


def make_roles(layout: str = "hydra", needed=("policy", "reference"), seed: int = 0, **options) -> Roles:
    """The roles of a layout on copies of one small model; adapters alike for every layout and seed."""
    torch.manual_seed(seed)
    heads = {"reward_head": TRAINED_HEAD, "value_head": TRAINED_HEAD}
    options = {"lora": LORA} | heads | options
    return Roles(layout, lambda role: make_model(seed), needed=needed, **options)


def shift(roles: Roles, std: float = 0.05, seed: int = 1) -> Roles:
    """Move the adapters away from zero, so that ratios and KL are not trivial."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in roles.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=std, generator=generator)
    return roles


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def make_module(roles: Roles, replays: bool = True, **options) -> GRPO:
    options = {"clip_low": 0.2, "clip_high": 0.2} | options
    return GRPO(roles, make_optimizer, replays=replays, temperature=1.0, **options)


def make_datamodule(
    roles: Roles,
    correction: Correction = REPLAY,
    spec: CacheSpec = SPEC,
    seed: int = 0,
    credit: CreditRule | None = None,
    kl: KLConfig | None = None,
    reward=None,
    task=None,
    sampling=None,
    **update,
) -> RolloutDataModule:
    task = task or DigitsAreGood(n_terms=3)
    sampling = {"n_prompts": 4, "group_size": 4, "max_new_tokens": 10, "temperature": 1.0} | (sampling or {})
    return RolloutDataModule(
        roles,
        build_task_tokenizer(),
        task,
        PromptSource(task, split="train", seed=seed),
        spec,
        correction,
        credit or GroupCredit("grpo"),
        SamplingConfig(**sampling),
        UpdateConfig(**({"aggregation": "sequence"} | update)),
        seed=seed,
        kl=kl,
        reward=reward,
    )
