"""The processes that the first one of a run has started end with it, however it ends; none waits in vain."""

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric import Fabric
from lightning.fabric.utilities.distributed import _destroy_dist_connection

from lit_rlkv.stages.launching import starts_others

FIRST = "LIT_RLKV_FIRST_PROCESS"
"""Environment variable: the process that starts the others."""
POLL_S = 0.5


@contextmanager
def ending_together(fabric: Fabric) -> Iterator[None]:
    """A block in which all ranks work, their launch included; one that fails keeps no other waiting.

    Lightning looks after the processes that it has started, and ends all with the first of them that fails;
    it does not look after the process that starts them. Those of torchrun and srun have these to do that.
    """
    # On Windows the parent of a process in a virtual environment is a stub, which says nothing.
    is_ours = os.name == "posix" and fabric.world_size > 1 and starts_others(fabric)
    first = os.environ.get(FIRST) if os.environ.get("LOCAL_RANK", "0") != "0" else None
    over = threading.Event()
    if is_ours and first is not None:
        threading.Thread(target=end_without, args=(int(first), over), daemon=True).start()
    elif is_ours:
        os.environ[FIRST] = str(os.getpid())
    try:
        yield
    except (Exception, KeyboardInterrupt):
        # At its exit Lightning takes leave by NCCL, which waits for the others, and they wait for this one.
        atexit.unregister(_destroy_dist_connection)
        raise
    finally:
        over.set()
        os.environ.pop(FIRST, None)


def end_without(parent: int, over: threading.Event) -> None:
    """End this process at once, whatever it waits for, if the one that started it ends before it is over."""
    while os.getppid() == parent:
        if over.wait(POLL_S):
            return
    os._exit(1)
