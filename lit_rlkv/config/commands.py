"""Every key of `python -m lit_rlkv.evaluate` and `python -m lit_rlkv.export`."""

from dataclasses import MISSING, dataclass
from pathlib import PurePath
from typing import Literal

from lit_rlkv.checks import MAX_TEMPERATURE, Number, check_temperature
from lit_rlkv.config.errors import as_config_errors, require
from lit_rlkv.config.options import group, option, show
from lit_rlkv.config.schema import Kernels

FILES_OF_THE_RUN = ("choices", "environment", "evaluation", "evictions", "wandb")
"""JSON files that a run folder has without an evaluation by hand."""
TRUSTED = "your modules that the run names, such as [mypackage]; on the command line only"


@dataclass(frozen=True, kw_only=True)
class EvaluatedRewardConfig:
    """The reward of an evaluation, where it differs from the run's."""

    accuracy: str | None = option(
        None, "the function that gives right answers full score, or `environment`; null: as the run had it"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """An evaluation of a saved run."""

    ckpt: str = option(MISSING, "run folder, or one of its checkpoints/iteration-N", yaml="???")
    budgets: tuple[int, ...] | None = option(
        None, "budgets of every policy, beside dense and the run's own; null: the run's", least=1
    )
    policies: tuple[str, ...] | None = option(None, "policies beside the run's cache; null: the run's")
    n_prompts: int | None = option(None, "held-out prompts; null: as the run had it", least=1)
    n_mismatch: int | None = option(
        None, "prompts on which the mismatch is measured; null: as the run had it", least=1
    )
    batch_size: int | None = option(
        None, "most responses sampled at a time; null: as the run had it", least=1
    )
    temperature: Number | None = option(
        None,
        "of the responses that are scored, 0: greedy; null: as the run had it",
        least=0,
        most=MAX_TEMPERATURE,
    )
    top_k: int | None = option(None, "as rollout.top_k of fit; null: as the run had it", least=1)
    top_p: Number | None = option(
        None, "as rollout.top_p of fit, 1: off; null: as the run had it", above=0, most=1
    )
    min_p: Number | None = option(
        None, "as rollout.min_p of fit, 0: off; null: as the run had it", least=0, below=1
    )
    n_samples: int = option(1, "responses to each prompt", least=1)
    pass_at_k: tuple[int, ...] = option(
        (), "such as [1,8]: the chance that one of k responses is right; each at most n_samples", least=1
    )
    level: Number = option(0.95, "probability with which an interval covers", above=0, below=1)
    reward: EvaluatedRewardConfig = group(EvaluatedRewardConfig)
    kernels: Kernels | None = option(None, "as in fit; null: as the run had it")
    name: str = option("evaluate", "of the files in the run folder: NAME.json and NAME_samples.jsonl")
    trusted_modules: tuple[str, ...] = option((), TRUSTED)

    def __post_init__(self) -> None:
        if self.temperature is not None:
            with as_config_errors("evaluate"):
                check_temperature("temperature", self.temperature, is_greedy_allowed=True)
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

    ckpt: str = option(MISSING, "run folder, or one of its checkpoints/iteration-N", yaml="???")
    to: str = option(MISSING, "folder to write, which must not exist yet", yaml="???")
    overwrite: bool = option(False, "replace an earlier export in that folder")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "of the merged weights; null: the run's"
    )
    heads: bool = option(False, "write the reward and value heads too, and the critic's adapter")
    push_to: str | None = option(
        None, "name on the Hugging Face hub, OWNER/NAME, to upload the folder to; null: nowhere"
    )
    private: bool | None = option(
        None, "visibility of a new repository; null: as its owner's account sets it, public for most"
    )
    trusted_modules: tuple[str, ...] = option((), TRUSTED)

    def __post_init__(self) -> None:
        require(
            self.private is None or self.push_to is not None,
            f"private={show(self.private)} needs push_to, the repository that it is for; give both or none",
        )
