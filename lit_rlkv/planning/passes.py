"""The models of a run in memory, and the passes of its learner that fit beside them."""

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.config import Config, build
from lit_rlkv.kernels.quantization import group_of, record_bytes
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.activations import Checkpoints, checkpointed_layers
from lit_rlkv.models.backbone import head_dims, layer_kinds, n_kv_heads, text_config
from lit_rlkv.models.hydra import Roles
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.models.lm_head import model_body
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.models.pass_bytes import PassBytes
from lit_rlkv.planning.cards import Card

NF4_BYTES = 0.56
"""Bytes of a weight in NF4 with its scales."""
SIXTEEN_BITS = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Dtype that a precision computes in, if it is not that of the weights."""
TIME_BYTES = 4
"""Bytes of the time of an eviction in a pass of the learner."""
MARGIN = 0.15
"""Share by which the counted bytes of a pass may be wrong (benchmarks/pass_bytes.py)."""
MAX_TOKENS = 2**22
"""Longest sequence that is looked for."""
Bytes = dict[str, int]


def longest(needed: Callable[[int], int], room: int) -> int:
    """Return the most tokens, to 128, whose bytes fit into a room; 0: none."""
    return 128 * bisect(range(128, MAX_TOKENS, 128), room, key=needed)


@dataclass(frozen=True)
class Passes:
    """The one choice of the learner's passes, for models on the meta device or in memory.

    Args:
        roles: models of the run, or the backbone that SFT trains.
        pass_bytes: of the backbone that learns; None: nothing is to be chosen.
        n_prompt: tokens of a prompt.
        n_ranks: devices of the run, each such a card.
        limit: most tokens of a pass; less than the default after a pass that ran out of memory.
    """

    cfg: Config
    roles: Roles | PreTrainedModel
    pass_bytes: PassBytes | None
    card: Card
    n_prompt: int
    n_ranks: int = 1
    limit: int = TOKENS_PER_PASS

    @property
    def policy(self) -> PreTrainedModel:
        """The backbone that samples and learns."""
        return self.roles.backbone("policy") if isinstance(self.roles, Roles) else self.roles

    @property
    def n_columns(self) -> int:
        """Tokens of the longest sequence."""
        return self.n_prompt + self.cfg.rollout.max_new_tokens

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and of an unquantized cache."""
        return SIXTEEN_BITS.get(self.cfg.fabric.precision, self.policy.dtype)

    @cached_property
    def cache(self) -> CacheSpec:
        """The cache of the rollouts."""
        samples_dense = build(self.cfg.correction).samples_dense
        return CacheSpec.dense() if samples_dense else CacheSpec.of(self.cfg.cache).for_rollouts

    @cached_property
    def model_bytes(self) -> Bytes:
        """Bytes of weights, gradients and two moments of a rank."""
        found = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
        for weight in self.roles.parameters():
            found["weights"] += weight.numel() * self.size(weight)
            if weight.requires_grad and id(weight) not in self._idle:
                found["gradients"] += weight.numel() * weight.itemsize
                found["optimizer"] += 2 * weight.numel() * weight.itemsize
        return {what: int(n / (self.n_ranks if self.is_sharded else 1)) for what, n in found.items()}

    @cached_property
    def _idle(self) -> set[int]:
        """Weights that no text reaches, as of a tower for images: in memory, but neither read nor trained."""
        models = self.roles.modules() if isinstance(self.roles, Roles) else [self.roles]
        return {
            id(weight)
            for model in models
            if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None
            for weight in {*model_body(model).parameters()} - {*model.get_decoder().parameters()}
        }

    def size(self, weight: nn.Parameter) -> float:
        """Return the bytes of each number of a weight."""
        return NF4_BYTES if id(weight) in self._to_pack else weight.itemsize

    @cached_property
    def _to_pack(self) -> set[int]:
        """The weights without memory of linear layers that will be quantized; an output head is not."""
        if self.cfg.fabric.quantization is None or not isinstance(self.roles, Roles):
            return set()
        names = self.roles.backbones
        heads = {id(self.roles.named_backbone(name).get_output_embeddings().weight) for name in names}
        linear = {one.weight for one in names.modules() if isinstance(one, nn.Linear)}
        return {id(one) for one in linear if one.is_meta and not one.requires_grad} - heads

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds a part of the weights."""
        return self.cfg.fabric.strategy == "fsdp2"

    def gathered(self, *, is_whole: bool) -> Bytes:
        """Return the bytes of sharded weights that are gathered at a time: all, or two layers' share."""
        if not self.is_sharded:
            return {}
        n_bytes = sum(weight.numel() for weight in self.policy.parameters()) * self.dtype.itemsize
        n_layers = int(text_config(self.policy).num_hidden_layers)
        return {"gathered weights": n_bytes if is_whole else 2 * n_bytes // n_layers}

    @property
    def room(self) -> int:
        """Bytes of the device beside the models while the learner learns."""
        return self.card.usable - sum((self.model_bytes | self.gathered(is_whole=False)).values())

    def recorded_bytes(self, time_bytes: int) -> int:
        """Return the bytes of a token in the record: when its keys are evicted, and their codes."""
        dtype, dim = self.cache.dtype, max(head_dims(self.policy))
        n_bytes = 0 if dtype is None else 2 * record_bytes(dim, dtype, group_of(dtype, self.dtype))
        n_layers = sum(kind.attends for kind in layer_kinds(self.policy))
        return n_layers * n_kv_heads(self.policy) * (n_bytes + time_bytes)

    def needs(self, n_rows: int, n_columns: int, checkpoints: Checkpoints) -> Bytes:
        """Return the bytes of a pass, whose forwards all wait for their backward."""
        assert self.pass_bytes is not None
        needs = self.pass_bytes.of_pass(n_rows, n_columns, checkpoints)
        record = {"record of a pass": n_rows * n_columns * self.recorded_bytes(TIME_BYTES)}
        return needs | {"kept": needs["kept"] * self.n_graphs} | record

    @cached_property
    def n_graphs(self) -> int:
        """Forwards of a pass that wait for their backward: with PPO's critic, and what distillation adds."""
        more = 0 if self.cfg.distillation is None else build(self.cfg.distillation).n_graphs
        layout = LAYOUTS[self.cfg.roles.layout]
        is_shared = all(part["policy"] == part["value"] for part in (layout.backbone, layout.adapter))
        return 1 + int(more) + (not self.separate_passes and not is_shared)

    @property
    def separate_passes(self) -> bool:
        """False if policy and critic learn in one pass."""
        return bool(self.cfg.algorithm.loss.get("separate_passes", True))

    def fits(self, n_rows: int, checkpoints: Checkpoints, margin: float = MARGIN) -> bool:
        """Return True if a pass of rows of the longest sequence fits."""
        needs = self.needs(n_rows, self.n_columns, checkpoints)
        return (1 + margin) * sum(needs.values()) <= self.room

    @property
    def most(self) -> int:
        """Tokens that `fabric.tokens_per_pass` allows in a pass."""
        given = self.cfg.fabric.tokens_per_pass
        return self.limit if given == "auto" else given

    @property
    def ways(self) -> list[Checkpoints]:
        """The values that `roles.gradient_checkpointing` may take, the fastest first."""
        given = self.cfg.roles.gradient_checkpointing
        if given != "auto":
            return [given]
        if not checkpointed_layers(self.policy):
            return [False]
        return [False, True, "host"] if self.card.is_gpu else [False, True]

    def choose(self) -> int:
        """Return the number of the fastest of `ways` that fits with its margin, or of the last.

        All activations must fit in the largest pass, anything less for one sequence; after a pass that ran
        out of memory, not all are kept.
        """
        n_rows = max(self.most // self.n_columns, 1)
        for number, way in enumerate(self.ways[:-1]):
            if (way or self.limit == TOKENS_PER_PASS) and self.fits(1 if way else n_rows, way):
                return number
        return len(self.ways) - 1

    def n_tokens(self, checkpoints: Checkpoints) -> int:
        """Return the tokens of the largest pass that fits with its margin, at least of one sequence."""
        sizes = range(2, -(-self.most // self.n_columns) + 1)
        n_rows = 1 + bisect(sizes, False, key=lambda n: not self.fits(n, checkpoints))
        return min(self.most, n_rows * self.n_columns)

    def longest(self) -> int:
        """Return the tokens of the longest sequence that the learner takes, to 128; 0: none."""
        keeps = self.ways[-1]
        return longest(lambda n: sum(self.needs(1, n, keeps).values()), self.room)
