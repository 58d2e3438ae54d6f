"""A process that runs a program, and ends it with all that it has started when the trainer ends.

Its first argument is the file descriptor of a pipe or socket that closes with the trainer; the program and
its arguments follow. The program inherits input and output, and its status is passed on. This file is run
by its path and imports the standard library alone.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def main() -> None:
    """Run the program until it or the trainer ends."""
    # A scheduler may send SIGTERM to all processes of a run that still waits for the program.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    lifeline, argv = int(sys.argv[1]), sys.argv[2:]
    try:
        program = subprocess.Popen(argv, start_new_session=True)
    except OSError as error:
        sys.exit(f"cannot start {argv[0]}: {error.strerror}")
    threading.Thread(target=_end_with, args=(lifeline, program.pid), daemon=True).start()
    status = program.wait()
    _kill_group(program.pid)
    # A signal's number as shells write it.
    os._exit(status if status >= 0 else 128 - status)


def _end_with(lifeline: int, group: int) -> None:
    os.read(lifeline, 1)
    _kill_group(group)
    os._exit(1)


def _kill_group(group: int) -> None:
    """Kill also what the program left in the background, except in a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
