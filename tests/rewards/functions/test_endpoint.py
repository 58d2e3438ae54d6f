import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lit_rlkv.rewards import Endpoint, graders
from tests.rewards.helpers import score


class Handler(BaseHTTPRequestHandler):
    """Behaves as the completion says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((question, self.headers.get("Authorization")))
        n_asked, completion = len(self.server.asked), question["completion"]
        if completion == "hang":
            self.server.is_over.wait(20)
        if completion == "drip":
            self.drip(b"Content-Length: 1000\r\n\r\n")
        elif completion == "drip headers":
            self.drip(b"X-Wait: ")
        elif completion == "drip chunks":
            self.drip(b"Transfer-Encoding: chunked\r\n\r\n")
        elif completion == "move":
            self.answer(302, "0", {"Location": "/elsewhere"})
        elif completion == "third" and n_asked < 3:
            self.answer(503, "")
        elif completion == "bad":
            self.answer(400, "")
        elif completion == "words":
            self.answer(200, "great")
        else:
            self.answer(200, json.dumps({"reward": 0.25} if completion == "object" else len(completion)))

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def drip(self, header):
        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + header)
        with suppress(OSError):
            while not self.server.is_over.wait(0.05):
                self.wfile.write(b"0")

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(graders, "BACKOFF_S", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.asked, server.is_over = [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/score"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.is_over.set()
    server.shutdown()
    server.server_close()


def test_the_response_is_a_number_or_an_object_with_a_reward(server):
    assert score(Endpoint(url=server.url), "four", "4", prompt="2+2", level=3) == 4.0
    assert score(Endpoint(url=server.url), "object") == 0.25
    question = {"prompt": "2+2", "answer": "4", "solution": "", "completion": "four", "level": 3}
    assert server.asked[0] == (question, None)


def test_server_errors_are_retried(server):
    assert score(Endpoint(url=server.url, retries=2), "third") == 5.0
    assert len(server.asked) == 3


def test_the_last_server_error_is_raised(server):
    with pytest.raises(RuntimeError, match="/score answered 503 Service Unavailable"):
        score(Endpoint(url=server.url, retries=1), "third")
    assert len(server.asked) == 2


@pytest.mark.parametrize(("completion", "status"), [("bad", 400), ("move", 302)])
def test_client_errors_and_redirects_are_not_retried(server, completion, status):
    with pytest.raises(Exception, match=f"answered {status}"):
        score(Endpoint(url=server.url, retries=2), completion)
    assert len(server.asked) == 1


@pytest.mark.parametrize("completion", ["hang", "drip", "drip headers", "drip chunks"])
def test_an_endless_response_times_out(server, completion):
    started_at = time.perf_counter()
    with pytest.raises(Exception, match=r"timed out|no complete response within"):
        score(Endpoint(url=server.url, timeout_s=0.3, retries=0), completion)
    assert time.perf_counter() - started_at < 10


def test_close_ends_pending_requests(server):
    grader = Endpoint(url=server.url, timeout_s=60, retries=0).open()
    future = grader.submit({"completion": "drip headers"})
    while not server.asked:
        time.sleep(0.01)
    started_at = time.perf_counter()
    grader.close()
    assert "no complete response within" in str(future.exception(timeout=10))
    assert time.perf_counter() - started_at < 10


def test_a_response_that_is_not_json_and_a_missing_server_are_errors(server):
    with pytest.raises(Exception, match="Expecting value"):
        score(Endpoint(url=server.url, retries=0), "words")
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1/: .*(refused|failed)"):
        score(Endpoint(url="http://127.0.0.1:1/", retries=0), "?")


def test_a_token_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    score(Endpoint(url=server.url, token_env="JUDGE_TOKEN"), "?")
    assert server.asked[0][1] == "Bearer secret"
    monkeypatch.setenv("JUDGE_TOKEN", "secret\r\n")
    score(Endpoint(url=server.url, token_env="JUDGE_TOKEN"), "?")
    assert server.asked[1][1] == "Bearer secret"
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(ValueError, match="token_env='JUDGE_TOKEN' must be set"):
        Endpoint(url=server.url, token_env="JUDGE_TOKEN").open()


@pytest.mark.parametrize("token", ["sec\nret", "sec\x1bret", "secrét"])
def test_an_invalid_token_is_refused_and_not_shown(monkeypatch, token):
    monkeypatch.setenv("JUDGE_TOKEN", token)
    with pytest.raises(ValueError, match="token_env='JUDGE_TOKEN' must be set") as caught:
        Endpoint(url="http://localhost/", token_env="JUDGE_TOKEN").open()
    assert "sec" not in str(caught.value)


def test_errors_show_addresses_without_secrets(server):
    for url, completion in {f"{server.url}?key=secret": "bad", "http://127.0.0.1:1/x?key=secret": ""}.items():
        with pytest.raises(Exception, match=url.partition("?")[0]) as caught:
            score(Endpoint(url=url, retries=0), completion)
        assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match=r"without user and password.*got 'http://host/x'") as caught:
        Endpoint(url="http://me:secret@host/x?key=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://host:port/",
        "file:///etc/passwd",
        "ftp://host/x",
        "localhost:8000",
        "http://",
    ],
)
def test_only_http_addresses_are_accepted(url):
    with pytest.raises(ValueError, match="url must be an address with http"):
        Endpoint(url=url)
