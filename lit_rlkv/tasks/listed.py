"""Base of tasks over a user's rows: rows to train on, then rows to evaluate on."""

import logging
import random
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from lit_rlkv.tasks.rows import Table
from lit_rlkv.types import PreferencePair, Problem

log = logging.getLogger(__name__)
_Row = TypeVar("_Row", Problem, PreferencePair)


class ListedTask(ABC, Generic[_Row]):
    """A finite task of the rows of a table, and of another one for evaluation where there is one.

    Rows with a prompt that is held out are left out, with a warning that says how many.

    Raises:
        ValueError: there is nothing to train on.
    """

    def __init__(self, table: Table[_Row], held_out: Table[_Row] | None = None) -> None:
        if not table.rows:
            raise ValueError(f"{table.source!r} holds no rows, so there is nothing to train on; give some")
        self.source = table.source
        """Where the rows are from, for messages."""
        self.n_held_out = 0 if held_out is None else len(held_out.rows)
        """The last rows, which are for evaluation alone."""
        self._table: Table[_Row] = table if held_out is None else _with_held_out(table, held_out)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r})"

    def __len__(self) -> int:
        return len(self._table.rows)

    @abstractmethod
    def at(self, index: int) -> Problem:
        """The problem of a row, counted from 0 without blank lines; those held out come last."""

    def place(self, index: int) -> str:
        """Where a row stands in its source."""
        return self._table.places[index]

    @property
    def digest(self) -> str | None:
        """Tells the rows from any others; None where they are not read but made."""
        return self._table.digest

    def rejected(self, index: int) -> str:
        """The side that a row ranks below its solution; empty where it has none."""
        return ""

    def sample(self, rng: random.Random) -> Problem:
        """Any row's of those to train on."""
        return self.at(rng.randrange(len(self) - self.n_held_out))


def _with_held_out(table: Table[_Row], held_out: Table[_Row]) -> Table[_Row]:
    prompts = {row.prompt for row in held_out.rows}
    kept = [index for index, row in enumerate(table.rows) if row.prompt not in prompts]
    n_shared = len(table.rows) - len(kept)
    if n_shared > 0:
        log.warning("%d rows of %s are also held out; they are not trained on", n_shared, table.source)
    if not kept:
        raise ValueError(f"every row of {table.source!r} is also held out; give another eval_split")
    return Table(
        table.source,
        [table.rows[index] for index in kept] + held_out.rows,
        [table.places[index] for index in kept] + held_out.places,
        f"{table.digest}+{held_out.digest}",
    )
