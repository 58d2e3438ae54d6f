"""Command lines and functions in forks of the test process, which has imported everything already."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable


def in_a_fork(work: Callable[[], object]) -> tuple[int, str]:
    """Run a function in a fork; return its exit code, as a process would have it, and all that it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _end_with(work, writing)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def start(work: Callable[[], object]) -> int:
    """Run a function in a fork that nobody waits for; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def ended(
    main: Callable[[], object], *arguments: object, before: Callable[[], object] = lambda: None
) -> tuple[int, str]:
    """Run the main function of a command with these arguments, as `in_a_fork` does.

    Args:
        before: called in the fork first.
    """

    def work() -> None:
        sys.argv = [main.__module__, *map(str, arguments)]
        before()
        main()

    return in_a_fork(work)


def _end_with(work: Callable[[], object], pipe: int) -> None:
    code: object = 1
    try:
        for stream in (1, 2):
            os.dup2(pipe, stream)
        sys.stdout, sys.stderr = (open(stream, "w", buffering=1) for stream in (1, 2))  # noqa: SIM115
        logging.getLogger().handlers.clear()  # pytest's own
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
        sys.stdout.flush()
        os._exit(code)
