"""A local stand-in for the part of W&B's service that a run without artifacts needs."""

import gzip
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

PROJECT = {"id": "P", "name": "tests", "entity": {"id": "E", "name": "me"}}


class Service(ThreadingHTTPServer):
    """Stores runs like the real service: a new line replaces the old one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lines: dict[str, dict[int, str]] = {}
        self.summary: dict[str, str] = {}
        self.config: dict[str, str] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may be gone before it has read everything; what else goes wrong is printed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def history(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in sorted(self.lines[run].items())]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing to the console."""

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path.startswith("/files/"):
            self._store(self.path.split("/")[4], json.loads(body).get("files") or {})
            self._answer({})
        elif self.path == "/graphql":
            asked = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"]).group(1)
            self._answer({"data": self._data(operation, asked.get("variables") or {})})
        else:  # telemetry
            self._answer({})

    def _store(self, run: str, files: dict[str, Any]) -> None:
        for name, chunk in files.items():
            if "history" in name:
                new = enumerate(chunk["content"], start=chunk["offset"])
                self.server.lines.setdefault(run, {}).update(new)
            if "summary" in name:
                self.server.summary[run] = chunk["content"][-1]

    def _data(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        service = self.server
        if operation == "Viewer":
            me = {"id": "V", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": me}
        if operation == "UpsertBucket":
            service.config[asked["name"]] = asked.get("config") or service.config.get(asked["name"], "{}")
            return {"upsertBucket": {"bucket": self._run(asked["name"]), "inserted": False}}
        if operation == "RunResumeStatus":
            is_known = asked["name"] in service.config
            return {"model": {**PROJECT, "bucket": self._run(asked["name"]) if is_known else None}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{service.url}/up/{name}"} for name in asked["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        return {}

    def _run(self, name: str) -> dict[str, Any]:
        lines = self.server.lines.get(name, {})
        return {
            "id": name, "name": name, "displayName": name, "description": "", "sweepName": None,
            "project": PROJECT, "config": self.server.config[name], "tags": [], "fileStreamOffset": None,
            "summaryMetrics": self.server.summary.get(name, "{}"),
            "historyLineCount": len(lines), "logLineCount": 0, "eventsLineCount": 0,
            "historyTail": json.dumps([line for _, line in sorted(lines.items())][-1:]), "eventsTail": "[]",
            "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running() -> Iterator[Service]:
    with Service() as service:
        Thread(target=service.serve_forever, daemon=True).start()
        try:
            yield service
        finally:
            service.shutdown()
