"""A grader whose questions wait in threads, for answers that come from outside of this process."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

from lit_rlkv.rewards.graders.base import Grader, Question, Refused, as_score

log = logging.getLogger(__name__)
BACKOFF_S = 0.5
"""Before the second try; doubled before each further one."""
LONGEST_BACKOFF_S = 8.0


class Threads(Grader):
    """Asks up to `n_workers` questions at a time, each again after a failure, up to `retries` times.

    Args:
        ask: raises where there is no answer in time, and `Refused` where asking again would not help.
        on_close: ends what `ask` may be waiting for.
    """

    def __init__(
        self,
        ask: Callable[[Question], Any],
        *,
        n_workers: int,
        retries: int = 0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask = ask
        self._retries = retries
        self._on_close = on_close
        self._is_closing = Event()
        self._pool = ThreadPoolExecutor(n_workers, thread_name_prefix="reward")

    def submit(self, question: Question) -> "Future[float]":
        return self._pool.submit(self._answer, question)

    def close(self) -> None:
        self._is_closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._on_close()
        self._pool.shutdown(wait=True)

    def _answer(self, question: Question) -> float:
        backoff_s = BACKOFF_S
        for _ in range(self._retries):
            try:
                return as_score(self._ask(question))
            except Refused:
                raise
            except Exception as error:  # the last try, below, raises what it meets
                log.info("a reward function failed, and is asked again in %g s: %s", backoff_s, error)
                if self._is_closing.wait(backoff_s):
                    raise
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
        return as_score(self._ask(question))
