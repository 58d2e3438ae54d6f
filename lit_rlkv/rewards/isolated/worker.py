"""A process that scores completions with a function of a file: JSON lines in, JSON lines out.

It ends when its input ends, also in the middle of a question, so that it never outlives its trainer. It
ignores SIGTERM, which a scheduler may send to all processes of a run that still waits for an answer. This
file is run by its path and imports the standard library alone, so that it starts fast and is small.
"""

import faulthandler
import importlib.util
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

_MAX_MESSAGE = 200
"""Characters of an error that are sent; file and line follow."""


def main() -> None:
    """Load the function that the first line names, then answer each further line with one."""
    # A handler, because what the function starts would inherit an ignored signal and could not be ended.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    questions, answers = _private_pipes()
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(questions, lines), daemon=True).start()
    job = json.loads(lines.get())
    try:
        function = load(job["path"], job["function"])
    except BaseException as error:
        _write(answers, {"error": _message(error)})
        return
    _write(answers, {"ready": True})
    nowhere = open(os.devnull, "w")  # noqa: SIM115, it stays open
    while True:
        question = json.loads(lines.get())
        # A function that holds the interpreter's lock keeps the reading thread from ending the process.
        faulthandler.dump_traceback_later(job["limit_s"], exit=True, file=nowhere)
        answer = _answer(function, question, job["options"])
        faulthandler.cancel_dump_traceback_later()
        _write(answers, answer)


def load(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a Python file, which may import modules beside it."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location("lit_rlkv_reward_function", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _answer(
    function: Callable[..., Any], question: dict[str, Any], options: dict[str, Any]
) -> dict[str, float | str]:
    try:
        score = function(**_arguments(function, question, options), **options)
        if isinstance(score, str | bytes) or score is None:
            raise TypeError(f"it returned {score!r}; return a number")
        return {"score": float(score)}
    except (Exception, SystemExit) as error:
        return {"error": _message(error)}


def _arguments(
    function: Callable[..., Any], question: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields that the function has parameters for; options win over fields of their name."""
    question = {name: value for name, value in question.items() if name not in options}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return question
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in question.items() if name in names}


def _message(error: BaseException) -> str:
    """Return an error with the line of the user's file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame for frame in frames if frame.filename != __file__]
    at = f" ({Path(inner[-1].filename).name}, line {inner[-1].lineno})" if inner else ""
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE] + at


def _read(questions: TextIO, lines: "SimpleQueue[str]") -> None:
    for line in questions:
        lines.put(line)
    os._exit(0)


def _write(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _private_pipes() -> tuple[TextIO, TextIO]:
    """Return input and output that the function cannot touch: its prints go to the standard error."""
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return questions, answers


if __name__ == "__main__":
    main()
