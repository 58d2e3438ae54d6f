"""Endpoint: the score of an HTTP service, from a POST with a limit on its total time."""

import asyncio
import json
import os
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import MAX_BYTES, Grader, NonRetryableError, Question, Threads

_RETRYABLE_STATUS = (408, 425, 429)
"""Client errors that may pass with time, as all server errors may."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(SlowFunction):
    """Score of an HTTP endpoint that receives a POST for each completion.

    The body is a JSON object with `prompt`, `answer`, `solution`, `completion` and the extra columns; the
    response is a JSON number, or an object with a number as `reward`. Failures are retried after 0.5, 1, 2,
    ... seconds, unless the status says that the request is wrong. Redirects are not followed.
    """

    url: str
    token_env: str | None = None
    """Environment variable with a bearer token, so that the token is in no config."""
    n_workers: int = 8
    retries: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        url: httpx.URL | None
        try:
            url = httpx.URL(self.url)
        except (httpx.InvalidURL, TypeError):  # whose message may repeat a secret of the query
            url = None
        if url is None or url.scheme not in ("http", "https") or not url.host or url.userinfo:
            given = "one that cannot be read" if url is None else repr(_shown(url))
            raise ValueError(
                "url must be an address with http:// or https:// and without user and password, because the "
                f"config is saved, got {given}; give the variable of a token in token_env"
            )

    def open(self) -> Grader:
        service = _Service(httpx.URL(self.url), self._headers(), self.timeout_s)
        return Threads(service.ask, n_workers=self.n_workers, retries=self.retries, on_close=service.close)

    def _headers(self) -> dict[str, str]:
        # Not in __post_init__: no token is needed to look at a config.
        if self.token_env is None:
            return {}
        token = os.environ.get(self.token_env, "").strip()
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError(
                f"token_env={self.token_env!r} must be set in this environment, to printable ASCII "
                "characters as in headers; export the token alone"
            )
        return {"Authorization": f"Bearer {token}"}


def _shown(url: httpx.URL) -> str:
    """Return an address without its user, password, query and fragment."""
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))


class _Service:
    """An address with its pending requests."""

    def __init__(self, url: httpx.URL, headers: dict[str, str], timeout_s: float | int) -> None:
        self._url, self._headers, self._timeout_s = url, headers, timeout_s
        self._shown = _shown(url)
        self._certificates = ssl.create_default_context()  # takes a while, so all requests share it
        self._pending: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[bytes]]] = set()
        self._is_closed = False

    def ask(self, question: Question) -> Any:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            pending = loop, loop.create_task(self._post(question))
            self._pending.add(pending)
            try:
                if self._is_closed:
                    raise NonRetryableError("the reward functions are closed")
                # Of the whole request: a service may send a byte at a time.
                body = runner.run(asyncio.wait_for(pending[1], self._timeout_s))
            except (TimeoutError, asyncio.CancelledError):
                raise TimeoutError(f"no complete response within {self._timeout_s:g} seconds") from None
            except httpx.HTTPError as error:
                raise RuntimeError(f"{self._shown}: {error.__cause__ or error}") from None
            finally:
                self._pending.discard(pending)
        answer = json.loads(body)
        return answer["reward"] if isinstance(answer, dict) and "reward" in answer else answer

    async def _post(self, question: Question) -> bytes:
        async with (
            httpx.AsyncClient(verify=self._certificates, headers=self._headers, timeout=None) as client,
            client.stream("POST", self._url, json=question) as response,
        ):
            if not response.is_success:
                is_final = response.status_code < 500 and response.status_code not in _RETRYABLE_STATUS
                raise (NonRetryableError if is_final else RuntimeError)(
                    f"{self._shown} answered {response.status_code} {response.reason_phrase}"
                )
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_BYTES:
                    raise NonRetryableError(f"the response must have at most {MAX_BYTES} bytes")
            return bytes(body)

    def close(self) -> None:
        self._is_closed = True
        for loop, task in list(self._pending):
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)
