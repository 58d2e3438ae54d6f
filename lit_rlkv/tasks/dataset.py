"""Problems from files and Hugging Face datasets, whatever their columns are called."""

from collections.abc import Sequence
from functools import partial

from lit_rlkv.tasks.problems import Problems, RowFormat
from lit_rlkv.tasks.rows import read_rows

_OWN = ("prompt", "answer", "solution")
_HINT = "set prompt_column, answer_column and solution_column, with null where there is no answer or solution"


def load_problems(
    dataset: str,
    *,
    name: str | None = None,
    split: str = "train",
    eval_split: str | None = None,
    prompt_column: str = "prompt",
    answer_column: str | None = "answer",
    solution_column: str | None = None,
    extra_columns: Sequence[str] = (),
    system_prompt: str | None = None,
    answer_after: str | None = None,
) -> Problems:
    """The problems of a dataset; every row is looked at.

    Args:
        dataset, name, split: as `lit_rlkv.tasks.rows.read_rows` takes them.
        eval_split: the problems to evaluate on; None holds out about one in ten.
        prompt_column: a text, or chat messages that end in the user's.
        answer_column: texts or numbers; None takes what follows `answer_after` in the solution, or where
            there is no solution either, gives prompts alone.
        solution_column: worked solutions for the SFT stage; None shows the answer alone.
        extra_columns: what reward functions get beside prompt, answer and solution.
        system_prompt: a message before every prompt that brings none of its own.
        answer_after: the marker before the final answer ("####" in GSM8K), for the task's own score. Without
            it that is the whole completion, and there is no own score where solutions say more than it.

    Raises:
        ImportError: the package datasets is missing.
        ValueError: options that contradict each other, nothing can be loaded, or bad rows, by their place.
    """
    if answer_column is None and solution_column is not None and answer_after is None:
        raise ValueError(
            f"solution_column={solution_column!r} holds no answer that could be found; set answer_column, or "
            "answer_after to the marker before the answer"
        )
    taken = [column for column in extra_columns if column in _OWN or column == "completion"]
    if taken:
        raise ValueError(f"extra_columns={list(extra_columns)}: {', '.join(taken)} would hide what is there")
    wanted = {"prompt": prompt_column, "answer": answer_column, "solution": solution_column}
    wanted |= {column: column for column in extra_columns}
    columns = tuple((key, column) for key, column in wanted.items() if column is not None)
    has_own_score = answer_after is not None or (answer_column is not None and solution_column is None)
    form = RowFormat(answer_after, system_prompt, has_own_score, tuple(extra_columns))
    read = partial(read_rows, dataset, form, columns, hint=_HINT, name=name)
    return Problems(
        read(split=split),
        None if eval_split is None else read(split=eval_split),
        answer_after=answer_after,
        is_verifiable=has_own_score,
    )
