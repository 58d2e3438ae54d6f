"""Problems from a file: one JSON object per line with a prompt, an answer and perhaps a worked solution."""

from pathlib import Path

from lit_rlkv.tasks.problems import Problems, RowFormat
from lit_rlkv.tasks.rows import read_lines


class JsonlTask(Problems):
    """Problems of lines that look like `{"prompt": "2+2=", "answer": "4"}`; other keys are ignored.

    `answer_after` is the marker that ends the reasoning ("####" in GSM8K): what follows its last occurrence
    is the final answer, and a completion without it scores 0.0. By default it is the whole completion.
    """

    def __init__(self, path: str | Path, *, answer_after: str | None = None) -> None:
        form = RowFormat(answer_after, required=("prompt", "answer"))
        super().__init__(read_lines(path, form), answer_after=answer_after)
