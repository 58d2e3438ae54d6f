"""PPO on each role layout, and supervised fine-tuning of the same model, ready to be run on any batch."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import lightning as L
import torch
from hydra_parts.setting import RandomWords, Setting, make_backbone, make_tokenizer
from lightning.fabric import Fabric
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.config import CONF_DIR, build
from lit_rlkv.config.options import convert
from lit_rlkv.config.schema import (
    AlgorithmConfig,
    CacheConfig,
    KLConfig,
    RewardConfig,
    RolesConfig,
    RolloutConfig,
)
from lit_rlkv.data.demonstrations import DemonstrationBatch, SFTBatch
from lit_rlkv.distributed.ranks import SINGLE_PROCESS
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.models.adapters import LoraSpec
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import ROLES
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.rewards import RewardManager
from lit_rlkv.trainer import train

PPO = OmegaConf.load(CONF_DIR / "algorithm" / "ppo.yaml")
ALGORITHM = AlgorithmConfig(
    group_size=1, n_minibatches=1, aggregation=PPO.aggregation, kl=convert(KLConfig, {**PPO.kl})
)
CORRECTION = OmegaConf.load(CONF_DIR / "correction" / "shadow.yaml")
OPTIMIZER = OmegaConf.load(CONF_DIR / "optimizer" / "adamw.yaml")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtype of the backbones; adapters and heads are in float32."""
SFT = "sft"


def make_roles(layout: str, setting: Setting) -> Roles:
    """All four roles, on backbones that start alike."""
    torch.manual_seed(0)
    head = {"linear.weight": torch.randn(1, setting.size.hidden_size), "linear.bias": torch.zeros(1)}
    return Roles(
        layout,
        lambda role: make_backbone(setting),
        lora=LoraSpec(setting.rank, 2 * setting.rank, "all-linear"),
        needed=ROLES,
        reward_head=head,
        value_head=head,
        checkpoints_layers=setting.checkpoints_layers,
    )


@dataclass(frozen=True)
class Run:
    """A variant that can be trained for some iterations on batches of any size."""

    module: L.LightningModule
    setting: Setting
    make_data: Callable[[int, RLCallback], L.LightningDataModule]
    """From a batch size to data with one optimizer step per loader."""

    def train(self, batch: int, n_iterations: int, callback: RLCallback) -> None:
        """The package's own loop with a fresh optimizer."""
        train(
            Fabric(accelerator=self.setting.device, devices=1),
            self.module,
            self.make_data(batch, callback),
            callbacks=[callback],
            n_iterations=n_iterations,
            max_grad_norm=ALGORITHM.max_grad_norm,
        )


def ppo_run(layout: str, setting: Setting) -> Run:
    """One PPO step on one rollout per iteration, with the options of conf/algorithm/ppo.yaml."""
    roles = make_roles(layout, setting)
    make_module = build(PPO.loss)
    module = make_module(roles, build(OPTIMIZER), replays=True, temperature=1.0, value_shadow=True)
    task = RandomWords(setting.prompt_len, setting.size.vocab_size)

    def make_data(batch: int, callback: RLCallback) -> L.LightningDataModule:
        cfg = SimpleNamespace(
            seed=0,
            cache=CacheConfig(),
            rollout=RolloutConfig(n_prompts=batch, max_new_tokens=setting.response_len),
            algorithm=ALGORITHM,
            reward=RewardConfig(learned=1.0),
            roles=RolesConfig(),
        )
        parts = SimpleNamespace(
            cache=setting.cache, correction=build(CORRECTION), advantage=build(PPO.advantage)
        )
        run = SimpleNamespace(
            cfg=cfg,
            parts=parts,
            tokenizer=make_tokenizer(setting.size.vocab_size),
            task=task,
            rewards=RewardManager({}),
            environments=None,
            ranks=SINGLE_PROCESS,
        )
        return RolloutDataModule(run, module, [callback])

    return Run(module, setting, make_data)


class Demonstrations(L.LightningDataModule):
    """One batch of random tokens per loader, as long as the rollouts of PPO."""

    def __init__(self, setting: Setting, batch: int) -> None:
        super().__init__()
        self.setting = setting
        self.batch = batch

    def train_dataloader(self) -> DataLoader[SFTBatch]:
        setting = self.setting
        seq_len = setting.prompt_len + setting.response_len
        input_ids = torch.randint(1, setting.size.vocab_size, (self.batch, seq_len))
        is_target = (torch.arange(seq_len) >= setting.prompt_len).expand_as(input_ids)
        demonstrations = DemonstrationBatch(
            input_ids, torch.ones_like(is_target), is_target, n_tokens=input_ids.shape[1]
        )
        return DataLoader(
            [SFTBatch(demonstrations, None, n_targets=int(demonstrations.is_target.sum()))], batch_size=None
        )  # type: ignore[arg-type]


def sft_run(setting: Setting) -> Run:
    """All weights of one model learn to imitate; the LM loss alone."""
    module = HydraSFT(
        make_backbone(setting),
        build(OPTIMIZER),
        reward_weight=0.0,
        n_steps=1000,
        n_warmup_steps=0,
        checkpoints_layers=setting.checkpoints_layers,
    )
    return Run(module, setting, lambda batch, callback: Demonstrations(setting, batch))


def make_run(variant: str, setting: Setting) -> Run:
    """A layout by its name, or `SFT`."""
    return sft_run(setting) if variant == SFT else ppo_run(variant, setting)
