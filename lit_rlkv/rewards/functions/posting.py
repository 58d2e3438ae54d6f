"""One POST that comes to an end in time, however slowly a service drips its answer."""

import socket
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from threading import Timer
from typing import Any
from urllib.error import HTTPError

from lit_rlkv.rewards.graders import Refused

MAX_BYTES = 1 << 20
"""Longest answer that is read."""


class Post(urllib.request.Request):
    """A question on its way to a service. Redirects are not followed.

    Args:
        timeout_s: for all of it; the time-out of a socket alone starts anew with every byte.
    """

    def __init__(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float | int) -> None:
        super().__init__(url, body, dict(headers), method="POST")
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._is_ended = False

    def answer(self) -> bytes:
        """The whole body of the answer.

        Raises:
            HTTPError, URLError: as urllib does.
            Refused: the answer is too long.
            TimeoutError: there is no whole answer in time, or `end` was called.
        """
        timer = Timer(self._timeout_s, self.end)
        timer.daemon = True
        timer.start()
        cause: Exception | None = None
        try:
            with _OPENER.open(self, timeout=self._timeout_s) as response:
                body = _read(response)
        except HTTPError:
            raise
        except Exception as error:
            if not self._is_ended:
                raise
            cause = error
        finally:
            timer.cancel()
        if self._is_ended:  # what was read until then may look whole
            raise TimeoutError(f"no whole answer within {self._timeout_s:g} seconds") from cause
        return body

    def end(self) -> None:
        """Shut the connection, whatever is waiting for it; may be called by any thread."""
        self._is_ended = True
        if self._connection is not None:
            self._connection.shut()

    def connection(self, kind: "type[_Connection]", host: str, **options: Any) -> "_Connection":
        """The connection that this request goes over, for urllib."""
        self._connection = kind(host, **options)
        if self._is_ended:
            self._connection.shut()
        return self._connection


class _Connection(HTTPConnection):
    """Knows its socket also when urllib has handed it on to the answer."""

    _opened: socket.socket | None = None
    _is_shut = False

    def connect(self) -> None:
        super().connect()
        self._opened = self.sock
        if self._is_shut:
            raise TimeoutError("the connection was shut before it was open")

    def shut(self) -> None:
        self._is_shut = True
        for opened in (self.sock, self._opened):
            if opened is not None:
                with suppress(OSError):
                    # Not the method of an SSL socket, which would take its state from under a reader.
                    socket.socket.shutdown(opened, socket.SHUT_RDWR)


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: Any) -> Any:
        return self.do_open(partial(req.connection, _Connection), req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: Any) -> Any:
        return self.do_open(partial(req.connection, _SecureConnection), req)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A reward is asked for where the config says, and nowhere else."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect, _Handler, _SecureHandler)


def _read(response: Any) -> bytes:
    body = b""
    while part := response.read1(1 << 16):
        body += part
        if len(body) > MAX_BYTES:
            raise Refused(f"the answer is longer than {MAX_BYTES} bytes")
    return body
