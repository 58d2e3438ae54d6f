"""Endpoint: the score of an HTTP service, from a POST with a limit on its total time."""

import asyncio
import json
import os
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

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
        if not _is_address(self.url):
            raise ValueError(
                f"url must be an ASCII address with http:// or https://, got {_without_secrets(self.url)!r}"
            )
        if "@" in urlsplit(self.url).netloc:
            raise ValueError(
                f"url must not have a user or a password before {_without_secrets(self.url)!r}, because the "
                "config is saved; give a token's variable in token_env"
            )

    def open(self) -> Grader:
        service = _Service(self.url, self._token(), self.timeout_s)
        return Threads(service.ask, n_workers=self.n_workers, retries=self.retries, on_close=service.close)

    def _token(self) -> str | None:
        # Not in __post_init__: no token is needed to look at a config.
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env, "").strip()
        if not token:
            raise ValueError(f"token_env={self.token_env!r} is not set in this environment; export it")
        if not token.isascii() or not token.isprintable():
            raise ValueError(
                f"token_env={self.token_env!r} must hold printable ASCII characters, as headers do; export "
                "the token alone"
            )
        return token


class _Service:
    """An address with its pending requests."""

    def __init__(self, url: str, token: str | None, timeout_s: float | int) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._certificates = ssl.create_default_context()  # takes a while, so all requests share it
        self._pending: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[bytes]]] = set()
        self._is_closed = False

    def ask(self, question: Question) -> Any:
        shown = _without_secrets(self._url)
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
                raise RuntimeError(f"{shown}: {error.__cause__ or error}") from None
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
                said = f"answered {response.status_code} {response.reason_phrase}"
                raise (NonRetryableError if is_final else RuntimeError)(
                    f"{_without_secrets(self._url)} {said}"
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


def _is_address(url: str) -> bool:
    # http.client would refuse the rest too, but repeat it with a secret in its query.
    if not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        is_port = parts.port != 0
    except ValueError:
        return False
    return is_port and parts.scheme in ("http", "https") and bool(parts.hostname)


def _without_secrets(url: str) -> str:
    """Return an address without its user, password, query and fragment."""
    scheme, separator, rest = url.partition("?")[0].partition("#")[0].rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
