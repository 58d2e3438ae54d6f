"""Allocations that fail, told by the settings of the run."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import ceil

from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.data.needs import Advice, Need, cache_advice, explain_sampling, explained, forward_needs
from lit_rlkv.data.settings import SamplingConfig, UpdateConfig
from lit_rlkv.faults import explaining_memory
from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.scoring import pass_of
from lit_rlkv.rollout.sizes import ModelShape, SamplingSizes, shape_of

N_TRAINED_COPIES = 3
"""Of what is trained: its gradient, and the two moments of Adam."""


class MemoryOfRL:
    """Explains allocations that fail in the phases of RL.

    Args:
        cache: as the config has it.
        samples_dense: the correction samples with a dense one in its place.
    """

    def __init__(
        self, cache: CacheSpec, sampling: SamplingConfig, update: UpdateConfig, *, samples_dense: bool
    ) -> None:
        self.cache = CacheSpec.dense() if samples_dense else cache
        """Of the rollouts."""
        self.cache_advice = cache_advice(self.cache, by_correction=samples_dense and not cache.is_dense)
        self.config = sampling
        self.update = update
        self.length = f"lower rollout.max_new_tokens={sampling.max_new_tokens}"
        self._scored: tuple[ModelShape, int, int] | None = None
        """What read the latest rollout, and its rows and columns."""

    def sizes(self, backbone: PreTrainedModel, n_prompts: int, n_prompt_columns: int) -> SamplingSizes:
        """Of responses to so many prompts, drawn by one call of `generate`."""
        config = self.config
        return SamplingSizes(
            model=shape_of(backbone),
            cache=self.cache,
            n_prompts=n_prompts,
            n_prompt_columns=n_prompt_columns,
            n_samples=config.group_size,
            max_rows=config.max_rows,
            max_new_tokens=config.max_new_tokens,
        )

    def advice(self, sizes: SamplingSizes) -> Advice:
        """What makes these sizes smaller."""
        config, now = self.config, _now(self.config.max_rows)
        rows = f"set rollout.max_rows below {sizes.n_rows} ({now})"
        if sizes.n_rows == sizes.n_samples:
            rows = f"lower algorithm.group_size={config.group_size}"
        responses = f"lower rollout.n_prompts={config.n_prompts} or algorithm.group_size={config.group_size}"
        return Advice(self.cache_advice, rows, responses, self.length)

    def sampling(self, roles: Roles, n_prompts: int, n_prompt_columns: int) -> AbstractContextManager[None]:
        """A block that samples responses to so many prompts at once."""

        def explain() -> str:
            sizes = self.sizes(roles.backbone("policy"), n_prompts, n_prompt_columns)
            return explain_sampling("the rollout", sizes, self.advice(sizes))

        return explaining_memory(explain)

    def scoring(
        self, roles: Roles, views: Mapping[str, bool], n_rows: int, n_columns: int
    ) -> AbstractContextManager[None]:
        """A block in which roles read a rollout of this shape; `views` as `score_rollout` takes them."""
        backbone = roles.backbone("policy")
        model = shape_of(backbone)
        self._scored = model, n_rows, n_columns

        def explain() -> str:
            limit = self.config.rows_per_pass
            n_own = min(n_rows, limit or n_rows)
            n_passes = len({pass_of(roles, *view) for view in views.items()})
            is_stacked = self.config.stacks_passes and n_passes > 1
            n_at_once = n_own * (n_passes if is_stacked else 1)
            helps = [f"set rollout.rows_per_pass below {n_own} ({_now(limit)})"] if n_own > 1 else []
            helps += ["set roles.stack_passes=false"] if is_stacked else []
            needs = forward_needs(
                model, n_at_once, n_columns, [*helps, self.length], has_masks=_has_masks(backbone)
            )
            return explained(f"scoring, {n_at_once} rows in a forward", needs)

        return explaining_memory(explain)

    def learning(self, roles: Roles) -> AbstractContextManager[None]:
        """A block of the updates on what was scored last."""

        def explain() -> str:
            assert self._scored is not None, "what is learned from has been scored"
            (model, n_rows, n_columns), update = self._scored, self.update
            n_own = ceil(ceil(n_rows / update.n_minibatches) / update.n_micro_batches)
            helps = [f"raise algorithm.n_micro_batches={update.n_micro_batches}"] if n_own > 1 else []
            helps += [] if roles.checkpoints_layers else ["set roles.gradient_checkpointing=true"]
            needs = forward_needs(
                model,
                n_own,
                n_columns,
                [*helps, self.length],
                has_masks=_has_masks(roles.backbone("policy")),
                keeps="inputs" if roles.checkpoints_layers else "layers",
            )
            is_whole = roles.layout.trains_backbones
            smaller = "choose roles=hydra, which trains adapters alone" if is_whole else "lower roles.rank"
            return explained(
                f"the update, {n_own} rows in a micro-batch", [*needs, trained_need(roles, [smaller])]
            )

        return explaining_memory(explain)


def evaluating(
    backbone: PreTrainedModel,
    cache: CacheSpec,
    prompts_shape: tuple[int, int],
    *,
    n_samples: int,
    max_rows: int,
    max_new_tokens: int,
) -> AbstractContextManager[None]:
    """A block that samples for an evaluation, of which `max_rows` are evaluation.batch_size."""
    lower = f"lower evaluation.batch_size={max_rows}"
    length = f"lower rollout.max_new_tokens={max_new_tokens}"
    smaller = lower if cache.is_dense else "lower cache.budget and evaluation.budgets"

    def explain() -> str:
        n_prompts, n_columns = prompts_shape
        sizes = SamplingSizes(
            shape_of(backbone), cache, n_prompts, n_columns, n_samples, max_rows, max_new_tokens
        )
        return explain_sampling("evaluation", sizes, Advice(smaller, lower, lower, length))

    return explaining_memory(explain)


def supervised(
    module: nn.Module, backbone: PreTrainedModel, n_rows: int, n_columns: int, helps: Sequence[str]
) -> AbstractContextManager[None]:
    """A block of supervised training on so many sequences at a time."""

    def explain() -> str:
        model, has_masks = shape_of(backbone), _has_masks(backbone)
        needs = forward_needs(model, n_rows, n_columns, helps, has_masks=has_masks, keeps="layers")
        return explained(f"warm-up, {n_rows} sequences at a time", [*needs, trained_need(module, ())])

    return explaining_memory(explain)


def trained_need(module: nn.Module, helps: Sequence[str]) -> Need:
    """Of learning, whatever the batch."""
    trained = [p for p in module.parameters() if p.requires_grad]
    product = f"{N_TRAINED_COPIES} × {sum(p.numel() for p in trained)} parameters that train"
    n_bytes = N_TRAINED_COPIES * sum(p.nbytes for p in trained)
    return Need("gradients and moments", n_bytes, product, helps)


def _has_masks(backbone: PreTrainedModel) -> bool:
    return not uses_triton(next(backbone.parameters()))


def _now(limit: int | None) -> str:
    return "now null, all at once" if limit is None else f"now {limit}"
