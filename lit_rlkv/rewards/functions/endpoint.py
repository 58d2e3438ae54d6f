"""A service that scores completions."""

import json
import os
import time
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import Grader, Question, Refused, Threads

MAX_BYTES = 1 << 20
"""Longest answer that is read."""
_WORTH_ANOTHER_TRY = (408, 425, 429)
"""Client errors that time may mend; those of the server all may."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(SlowFunction):
    """What an HTTP endpoint answers to a POST of each completion.

    The body is a JSON object with `prompt`, `answer`, `solution`, `completion` and the extra columns;
    the answer is a JSON number, or an object with a number as `reward`. Failures are tried again after 0.5,
    1, 2, ... seconds, unless the service says that the question is wrong. Redirects are not followed.
    """

    url: str
    token_env: str | None = None
    """The environment variable with a bearer token, which so does not stand in any config."""
    n_workers: int = 8
    retries: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"url={self.url!r} is no address of a service; give one with http:// or https://"
            )

    def open(self) -> Grader:
        # Not sooner: a config that is only looked at needs no token.
        if self.token_env is not None and self.token_env not in os.environ:
            raise ValueError(f"token_env={self.token_env!r} is not set in this environment; export it")
        return Threads(self._ask, n_workers=self.n_workers, retries=self.retries)

    def _ask(self, question: Question) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.token_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.token_env]}"
        request = urllib.request.Request(self.url, json.dumps(question).encode(), headers, method="POST")
        deadline = time.monotonic() + self.timeout_s
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as response:
                body = _read(response, deadline, self.timeout_s)
        except HTTPError as error:
            with error:
                said = f"{self.url} answered {error.code} {error.reason}"
            is_final = error.code < 500 and error.code not in _WORTH_ANOTHER_TRY
            raise (Refused if is_final else RuntimeError)(said) from None
        except URLError as error:
            raise RuntimeError(f"{self.url}: {error.reason}") from error
        answer = json.loads(body)
        return answer["reward"] if isinstance(answer, dict) and "reward" in answer else answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A reward is asked for where the config says, and nowhere else."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _read(response: Any, deadline: float, timeout_s: float | int) -> bytes:
    """The whole body, however slowly it drips."""
    body = b""
    while part := response.read1(1 << 16):
        body += part
        if len(body) > MAX_BYTES:
            raise Refused(f"the answer is longer than {MAX_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no whole answer within {timeout_s:g} seconds")
    return body
