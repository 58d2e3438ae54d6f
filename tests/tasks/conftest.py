"""Fixtures for tests of datasets."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.tasks.lines import write_lines


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, with its cache beside the data and no progress bars."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    package.disable_progress_bars()
    yield package
    package.enable_progress_bars()


@pytest.fixture
def write(tmp_path):
    """Return a function that writes lines, and returns their file."""
    return lambda *lines: write_lines(tmp_path / "rows.jsonl", lines)


@pytest.fixture
def httpserver_rows(tmp_path):
    """The address of a file of rows that a server of this machine has."""
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "secret.jsonl").write_text('{"prompt": "secret", "answer": "1"}\n')
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/secret.jsonl"
        server.shutdown()
