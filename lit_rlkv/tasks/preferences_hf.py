"""Preferences from files and Hugging Face datasets."""

from functools import partial

from lit_rlkv.tasks.preferences import Preferences, parse_pair
from lit_rlkv.tasks.rows import read_rows


def load_preferences(
    dataset: str,
    *,
    name: str | None = None,
    split: str = "train",
    eval_split: str | None = None,
    prompt_column: str | None = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
) -> Preferences:
    """The pairs of a dataset, each row as `parse_pair` takes it.

    Args:
        dataset, name, split: as `lit_rlkv.tasks.rows.read_rows` takes them.
        eval_split: the pairs to evaluate on; None holds out about one in ten. Those with a prompt of
            theirs are not trained on.
        prompt_column: None where both sides are whole conversations, which hold their prompt.

    Raises:
        ImportError: the package datasets is missing.
        ValueError: nothing can be loaded, a column is missing, or rows that are no pairs, by their place.
    """
    wanted = {"prompt": prompt_column, "chosen": chosen_column, "rejected": rejected_column}
    columns = tuple((key, column) for key, column in wanted.items() if column is not None)
    hint = (
        f"set {', '.join(f'{key}_column' for key in wanted)}, with prompt_column=null where the sides are "
        "whole conversations"
    )
    read = partial(read_rows, dataset, parse_pair, columns, hint=hint, name=name)
    return Preferences(read(split=split), None if eval_split is None else read(split=eval_split))
