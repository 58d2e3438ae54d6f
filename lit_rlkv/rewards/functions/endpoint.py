"""A service that scores completions."""

import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.functions.posting import Post
from lit_rlkv.rewards.graders import Grader, Question, Refused, Threads

_WORTH_ANOTHER_TRY = (408, 425, 429)
"""Client errors that time may mend; those of the server all may."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(SlowFunction):
    """Score of an HTTP endpoint that receives a POST for each completion.

    The body is a JSON object with `prompt`, `answer`, `solution`, `completion` and the extra columns;
    the answer is a JSON number, or an object with a number as `reward`. Failures are tried again after 0.5,
    1, 2, ... seconds, unless the service says that the question is wrong. Redirects are not followed.

    Raises:
        ValueError: `url` is no HTTP address, or has a user or a password in it.
    """

    url: str
    token_env: str | None = None
    """The environment variable with a bearer token, which so does not stand in any config."""
    n_workers: int = 8
    retries: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_address(self.url):
            raise ValueError(
                f"url={_shown(self.url)!r} is no address of a service; give one with http:// or https://, in "
                "plain characters"
            )
        if "@" in urlsplit(self.url).netloc:
            raise ValueError(
                f"url has a user or a password before {_shown(self.url)!r}, which would stand in the config; "
                "leave it out, and name the variable of a token in token_env"
            )

    def open(self) -> Grader:
        service = _Service(self.url, self._token(), self.timeout_s)
        return Threads(service.ask, n_workers=self.n_workers, retries=self.retries, on_close=service.close)

    def _token(self) -> str | None:
        # Not sooner: a config that is only looked at needs no token.
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env, "").strip()
        if not token:
            raise ValueError(f"token_env={self.token_env!r} is not set in this environment; export it")
        if not token.isascii() or not token.isprintable():
            raise ValueError(
                f"token_env={self.token_env!r} holds characters that no header can; export the token alone"
            )
        return token


class _Service:
    """The questions under way at an address."""

    def __init__(self, url: str, token: str | None, timeout_s: float | int) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._posts: set[Post] = set()
        self._is_closed = False

    def ask(self, question: Question) -> Any:
        post = Post(self._url, json.dumps(question).encode(), self._headers, self._timeout_s)
        self._posts.add(post)
        try:
            if self._is_closed:
                raise Refused("the reward functions are closed")
            body = post.answer()
        except HTTPError as error:
            with error:
                said = f"{_shown(self._url)} answered {error.code} {error.reason}"
            is_final = error.code < 500 and error.code not in _WORTH_ANOTHER_TRY
            raise (Refused if is_final else RuntimeError)(said) from None
        except URLError as error:
            raise RuntimeError(f"{_shown(self._url)}: {error.reason}") from error
        finally:
            self._posts.discard(post)
        answer = json.loads(body)
        return answer["reward"] if isinstance(answer, dict) and "reward" in answer else answer

    def close(self) -> None:
        """End what waits for an answer."""
        self._is_closed = True
        for post in list(self._posts):
            post.end()


def _is_address(url: str) -> bool:
    # What http.client would refuse it repeats whole, secrets in a query too.
    if not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        is_port = parts.port != 0
    except ValueError:
        return False
    return is_port and parts.scheme in ("http", "https") and bool(parts.hostname)


def _shown(url: str) -> str:
    """An address without what may be secret: who asks, and the query."""
    scheme, separator, rest = url.partition("?")[0].partition("#")[0].rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
