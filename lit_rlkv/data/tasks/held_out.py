"""Rows to train on, kept apart from those to evaluate on."""

import logging
from typing import TypeVar

from lit_rlkv.data.tasks.rows import Table
from lit_rlkv.types import PreferencePair, Problem

log = logging.getLogger(__name__)
_Row = TypeVar("_Row", Problem, PreferencePair)


def without_held_out(table: Table[_Row], held_out: Table[_Row]) -> Table[_Row]:
    """The rows of a table whose prompt is not among those held out; how many are left out is a warning.

    Raises:
        ValueError: there are none.
    """
    prompts = {row.prompt for row in held_out.rows}
    kept = [index for index, row in enumerate(table.rows) if row.prompt not in prompts]
    if len(kept) < len(table.rows):
        n_shared = len(table.rows) - len(kept)
        log.warning("%d rows of %s are also held out; they are not trained on", n_shared, table.source)
    if not kept:
        raise ValueError(f"every row of {table.source!r} is also held out; give another eval_split")
    return Table(table.source, [table.rows[index] for index in kept], [table.places[index] for index in kept])
