"""Every key of `python -m lit_rlkv.evaluate` and `python -m lit_rlkv.export`."""

from pathlib import PurePath
from typing import Literal

from lit_rlkv.config.errors import require
from lit_rlkv.config.schema import Kernels
from lit_rlkv.settings import (
    SAMPLING,
    Bool,
    Fraction,
    MinP,
    PositiveInt,
    Sampling,
    Temperature,
    Text,
    TopK,
    TopP,
    dataclass,
    show,
)

FILES_OF_THE_RUN = ("choices", "environment", "evaluation", "evictions", "wandb")
"""JSON files that a run folder has without an evaluation by hand."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedRewardConfig:
    """The reward of an evaluation, where it differs from the run's."""

    accuracy: Text | None = None
    """the function that gives right answers full score, or `environment`; null: as the run had it"""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """An evaluation of a saved run."""

    ckpt: Text
    """run folder, or one of its checkpoints/iteration-N"""
    budgets: tuple[PositiveInt, ...] | None = None
    """budgets of every policy, beside dense and the run's own; null: the run's"""
    policies: tuple[Text, ...] | None = None
    """policies beside the run's cache; null: the run's"""
    n_prompts: PositiveInt | None = None
    """held-out prompts; null: as the run had it"""
    n_mismatch: PositiveInt | None = None
    """prompts on which the mismatch is measured; null: as the run had it"""
    batch_size: PositiveInt | None = None
    """most responses sampled at a time; null: as the run had it"""
    perplexity: Text | None = None
    """as evaluation.perplexity of fit, such as texts.jsonl, for this evaluation alone; null: none"""
    temperature: Temperature | None = None
    """of the responses that are scored, 0: greedy; null: as the run had it"""
    top_k: TopK | None = None
    """as rollout.top_k of fit; null: as the run had it"""
    top_p: TopP | None = None
    """as rollout.top_p of fit, 1: off; null: as the run had it"""
    min_p: MinP | None = None
    """as rollout.min_p of fit, 0: off; null: as the run had it"""
    n_samples: PositiveInt = 1
    """responses to each prompt"""
    pass_at_k: tuple[PositiveInt, ...] = ()
    """such as [1,8]: the chance that one of k responses is right; each at most n_samples"""
    level: Fraction = 0.95
    """probability with which an interval covers"""
    reward: EvaluatedRewardConfig = EvaluatedRewardConfig()
    kernels: Kernels | None = None
    """as in fit; null: as the run had it"""
    name: Text = "evaluate"
    """of the files in the run folder: NAME.json and NAME_samples.jsonl"""
    trusted_modules: tuple[Text, ...] = ()
    """your modules that the run names, such as [mypackage]; on the command line only"""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in SAMPLING}
        Sampling(**{name: value for name, value in given.items() if value is not None})
        for k in self.pass_at_k:
            require(
                k <= self.n_samples,
                f"pass_at_k: pass@{k} cannot be estimated from n_samples={self.n_samples}; give k from 1 to "
                "n_samples, or raise that",
            )
        require(
            PurePath(self.name).name == self.name,
            f"name must be a plain file name, got {self.name}; the results lie in the run's folder, so leave "
            "out folders",
        )
        require(
            self.name not in FILES_OF_THE_RUN,
            f"name={self.name}: the run keeps {self.name}.json itself; give another name",
        )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """An export of a saved run's policy."""

    ckpt: Text
    """run folder, or one of its checkpoints/iteration-N"""
    to: Text
    """folder to write, which must not exist yet"""
    overwrite: Bool = False
    """replace an earlier export in that folder"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """of the merged weights; null: the run's"""
    heads: Bool = False
    """write the reward and value heads too, and the critic's adapter"""
    push_to: Text | None = None
    """name on the Hugging Face hub, OWNER/NAME, to upload the folder to; null: nowhere"""
    private: Bool | None = None
    """visibility of a new repository; null: as its owner's account sets it, public for most"""
    trusted_modules: tuple[Text, ...] = ()
    """your modules that the run names, such as [mypackage]; on the command line only"""

    def __post_init__(self) -> None:
        require(
            self.private is None or self.push_to is not None,
            f"private={show(self.private)} needs push_to, the repository that it is for; give both or none",
        )
