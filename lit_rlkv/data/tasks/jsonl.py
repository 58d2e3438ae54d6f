"""Problems from a file: one JSON object per line with a prompt, an answer and perhaps a worked solution."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rlkv.data.tasks.problems import Problems, RowFormat
from lit_rlkv.data.tasks.rows import read_lines
from lit_rlkv.types import Problem

_REQUIRED = ("prompt", "answer")


class JsonlTask(Problems):
    """Problems of lines that look like `{"prompt": "2+2=", "answer": "4"}`; other keys are ignored.

    `answer_after` is the marker that ends the reasoning ("####" in GSM8K): what follows its last occurrence
    is the final answer, and a completion without it scores 0.0. By default it is the whole completion.
    """

    def __init__(self, path: str | Path, *, answer_after: str | None = None) -> None:
        form = RowFormat(answer_after)

        def parse(entry: Mapping[str, Any]) -> Problem:
            missing = [key for key in _REQUIRED if key not in entry]
            if missing:
                raise ValueError(f"missing {', '.join(missing)}; each line needs {' and '.join(_REQUIRED)}")
            return form.parse(entry)

        super().__init__(read_lines(path, parse), answer_after=answer_after)
