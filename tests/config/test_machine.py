"""Checks of what the machine offers: the hub and its cache."""

import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.config.machine import answers, check_hub, is_cached


class Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_error(401)

    def log_message(self, *args):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return tmp_path / "hub"


def test_a_server_that_refuses_has_answered_and_a_closed_port_has_not():
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        assert answers(address)
        server.shutdown()
    answers.cache_clear()
    assert not answers(address)


def test_a_hub_behind_a_proxy_that_urllib_does_not_know_is_left_to_its_own_client(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    answers.cache_clear()
    assert answers("http://127.0.0.1:9")
    answers.cache_clear()


def test_what_is_in_the_cache_is_loaded_from_there_when_the_hub_is_away(cache, monkeypatch):
    monkeypatch.setattr("lit_rlkv.config.machine.answers", lambda url: False)
    says = r"model\.path=a/b is neither a local folder nor in the cache.*: hf download a/b$"
    with pytest.raises(ConfigError, match=says):
        check_hub("a/b", "model", is_offline=False)
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    snapshot = cache / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    check_hub("a/b", "model", is_offline=False)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert not is_cached("a/b", "dataset")
    (cache.parent / "datasets" / "a___b").mkdir(parents=True)
    assert is_cached("a/b", "dataset")
    (cache.parent / "datasets" / "A___word_list").mkdir()
    assert is_cached("A/WordList", "dataset")


def test_a_hub_that_answers_is_left_to_its_own_client(cache, monkeypatch):
    monkeypatch.setattr("lit_rlkv.config.machine.answers", lambda url: True)
    check_hub("a/b", "model", is_offline=False)
    assert os.environ["HF_HUB_OFFLINE"] == "0"
