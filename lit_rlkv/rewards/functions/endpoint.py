"""Endpoint: the score of an HTTP service, from a POST with a limit on its total time."""

import json
import os
import socket
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from threading import Timer
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

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
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._posts: set[_Post] = set()
        self._is_closed = False

    def ask(self, question: Question) -> Any:
        post = _Post(self._url, json.dumps(question).encode(), self._headers, method="POST")
        self._posts.add(post)
        try:
            if self._is_closed:
                raise NonRetryableError("the reward functions are closed")
            body = post.send(self._timeout_s)
        except HTTPError as error:
            with error:
                message = f"{_without_secrets(self._url)} answered {error.code} {error.reason}"
            is_final = error.code < 500 and error.code not in _RETRYABLE_STATUS
            raise (NonRetryableError if is_final else RuntimeError)(message) from None
        except URLError as error:
            raise RuntimeError(f"{_without_secrets(self._url)}: {error.reason}") from error
        finally:
            self._posts.discard(post)
        answer = json.loads(body)
        return answer["reward"] if isinstance(answer, dict) and "reward" in answer else answer

    def close(self) -> None:
        self._is_closed = True
        for post in list(self._posts):
            post.end()


class _Post(urllib.request.Request):
    """A request that can be ended at any time, however slowly the service sends its response."""

    _connection: "_Connection | None" = None
    _is_ended = False

    def send(self, timeout_s: float | int) -> bytes:
        """Return the body of the response.

        Raises:
            HTTPError, URLError: as urllib does.
            NonRetryableError: the response is too long.
            TimeoutError: it was not complete in time, or `end` was called.
        """
        # The timeout of a socket alone starts anew with every byte.
        timer = Timer(timeout_s, self.end)
        timer.daemon = True
        timer.start()
        cause: Exception | None = None
        try:
            with _OPENER.open(self, timeout=timeout_s) as response:
                body: bytes = response.read(MAX_BYTES + 1)
        except HTTPError:
            raise
        except Exception as error:
            if not self._is_ended:
                raise
            cause = error
        finally:
            timer.cancel()
        if self._is_ended:  # what was read until then may look complete
            raise TimeoutError(f"no complete response within {timeout_s:g} seconds") from cause
        if len(body) > MAX_BYTES:
            raise NonRetryableError(f"the response must have at most {MAX_BYTES} bytes")
        return body

    def end(self) -> None:
        """Shut the connection down; safe to call from any thread."""
        self._is_ended = True
        if self._connection is not None:
            self._connection.shut()

    def connect(self, kind: "type[_Connection]", host: str, **options: Any) -> "_Connection":
        """Return the connection for urllib to use."""
        self._connection = kind(host, **options)
        if self._is_ended:
            self._connection.shut()
        return self._connection


class _Connection(HTTPConnection):
    """A connection that keeps its socket after urllib has handed it on to the response."""

    _opened: socket.socket | None = None
    _is_shut = False

    def connect(self) -> None:
        super().connect()
        self._opened = self.sock
        if self._is_shut:
            raise TimeoutError("the connection was shut down before it was open")

    def shut(self) -> None:
        self._is_shut = True
        for opened in (self.sock, self._opened):
            if opened is not None:
                with suppress(OSError):
                    # Not SSLSocket.shutdown, which would take the state from under a reader.
                    socket.socket.shutdown(opened, socket.SHUT_RDWR)


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Handler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def http_open(self, req: Any) -> Any:
        return self.do_open(partial(req.connect, _Connection), req)

    def https_open(self, req: Any) -> Any:
        return self.do_open(partial(req.connect, _SecureConnection), req)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Only the address in the config is asked."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect, _Handler)


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
