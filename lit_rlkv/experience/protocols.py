"""The parts of a run and of an RL module that rollouts and evaluations need, as protocols."""

from typing import Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from lit_rlkv.config.schema import Config
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.environments.conversations import EnvironmentPool
from lit_rlkv.experience.advantages import AdvantageEstimator
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.hydra import Roles
from lit_rlkv.objectives.corrections import Correction
from lit_rlkv.rewards import RewardManager
from lit_rlkv.tasks import Task


@runtime_checkable
class RolloutParts(Protocol):
    """The objects of a config that rollouts need."""

    @property
    def cache(self) -> CacheSpec: ...
    @property
    def correction(self) -> Correction: ...
    @property
    def advantage(self) -> AdvantageEstimator: ...


@runtime_checkable
class RolloutRun(Protocol):
    """The part of a run that rollouts and evaluations need; `lit_rlkv.runs.run.Run` has all of it."""

    @property
    def cfg(self) -> Config: ...
    @property
    def parts(self) -> RolloutParts: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def task(self) -> Task: ...
    @property
    def rewards(self) -> RewardManager: ...
    @property
    def environments(self) -> EnvironmentPool | None: ...
    @property
    def ranks(self) -> Ranks: ...


@runtime_checkable
class RolloutModule(Protocol):
    """The part of an RL module that rollouts need; see `lit_rlkv.modules.base.PolicyModule`."""

    @property
    def roles(self) -> Roles: ...
    @property
    def learner_parts(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def warmup_part(self) -> tuple[str, ...]: ...
    @property
    def evictions(self) -> object | None: ...
