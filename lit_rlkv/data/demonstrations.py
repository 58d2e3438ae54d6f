"""PreferenceDataModule: worked solutions to imitate and corrupted ones to rank below them."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from lit_rlkv.data.pairs import (
    DemonstrationBatch,
    encode_completions,
    encode_demonstrations,
    preference_pair,
)
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.rng import derive_seed
from lit_rlkv.tasks import Task
from lit_rlkv.types import TensorBatch


@dataclass(frozen=True)
class SFTBatch(TensorBatch):
    """Demonstrations, and for the first of them a rejected completion of the same prompt."""

    chosen: DemonstrationBatch
    rejected: DemonstrationBatch | None
    """Row i pairs with row i of `chosen`; there may be fewer rows. None without any pairs."""
    n_targets: int | None = None
    """Tokens to imitate, in the batches of all ranks; None: this one is all there is."""
    n_ranks: int = 1
    """That share one step, each with as many rows."""
    ends_step: bool = True
    """Each is an optimizer step by itself."""
    learners: tuple[str, ...] = ()
    """No roles yet: the backbone and its heads learn as one."""


class PreferenceDataModule(L.LightningDataModule):
    """Endless problems, `steps_per_loader` batches a loader; each loader goes on where the last ended.

    Args:
        batch_size: rows of a step, shared by the ranks.
        n_pairs: rows of a step, from the first, that also bring a rejected completion; 0 for none.
        ranks: which `source` gives each its own problems.

    Raises:
        ValueError: `n_pairs` is below 0 or above `batch_size`.
    """

    def __init__(
        self,
        task: Task,
        source: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        n_pairs: int,
        steps_per_loader: int,
        seed: int,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        super().__init__()
        if not 0 <= n_pairs <= batch_size:
            raise ValueError(f"n_pairs={n_pairs} must be between 0 and batch_size={batch_size}")
        self.task = task
        self.source = source
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.batch_size = batch_size // ranks.size
        self.n_pairs = n_pairs
        self.steps_per_loader = steps_per_loader
        self.seed = seed
        self.n_batches = 0

    def train_dataloader(self) -> DataLoader[SFTBatch]:
        return DataLoader(_Stream(self), batch_size=None)

    def next_batch(self) -> SFTBatch:
        """The next problems of the source; the batch's number names the stream that corrupts them."""
        rejected = self._rejected() if self.n_pairs else None
        self.n_batches += 1
        chosen = encode_demonstrations(self.tokenizer, self.source.take(self.batch_size))
        n_targets = sum(self.ranks.all_gather_object([int(chosen.is_target.sum())]))
        return SFTBatch(chosen, rejected, n_targets, self.ranks.size)

    def _rejected(self) -> DemonstrationBatch:
        """Return this rank's pairs; one stream corrupts the pairs of all ranks, whatever their number."""
        rng = Random(derive_seed(self.seed, "corrupt", self.n_batches, SINGLE_PROCESS.rank))
        pairs = [preference_pair(self.task, problem, rng) for problem in self.source.ahead(self.n_pairs)]
        pairs = pairs[self.ranks.rank :: self.ranks.size]
        return encode_completions(self.tokenizer, [p.prompt for p in pairs], [p.rejected for p in pairs])

    def state_dict(self) -> dict[str, Any]:
        return {"n_batches": self.n_batches, "source": self.source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n_batches = state_dict["n_batches"]
        self.source.load_state_dict(state_dict["source"])


class _Stream(IterableDataset[SFTBatch]):
    def __init__(self, module: PreferenceDataModule) -> None:
        self.module = module

    def __iter__(self) -> Iterator[SFTBatch]:
        for _ in range(self.module.steps_per_loader):
            yield self.module.next_batch()
