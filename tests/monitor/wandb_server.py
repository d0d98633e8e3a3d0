"""A stand-in for W&B's server, on loopback: it answers what its client asks, and keeps what arrives."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """History of each run, as the real server keeps it: lines at their offsets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, dict[str, Any]] = {}
        self.history: dict[str, dict[int, dict[str, Any]]] = {}
        self.complete: dict[str, bool] = {}
        self.bodies: list[bytes] = []
        self.keys: set[str] = set()
        self.refuses = 0
        """The status with which it answers what is sent of a history; 0: it takes it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def rows(self, run: str) -> list[dict[str, Any]]:
        """The history of a run, in order and without a gap."""
        found = self.history[run]
        assert sorted(found) == list(range(len(found)))
        return list(map(found.__getitem__, range(len(found))))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None: ...

    def _say(self, answer: object, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        raw = gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw
        self.server.bodies.append(raw)
        kind, _, told = (self.headers.get("Authorization") or "").partition(" ")
        if kind == "Basic":
            self.server.keys.add(base64.b64decode(told).decode().removeprefix("api:"))
        return raw

    def do_PUT(self) -> None:
        self._body()
        self._say({})

    def do_POST(self) -> None:
        body = json.loads(self._body() or b"{}")
        if self.path != "/graphql" and self.server.refuses:
            self._say({}, self.server.refuses)
            return
        if self.path != "/graphql":
            self._say(self._stream(self.path.split("/")[-2], body))
            return
        asked = body["query"]
        given = body.get("variables") or {}
        answer: dict[str, Any] = {}
        if "UpsertBucket" in asked:
            run = self.server.runs.setdefault(given["name"], {})
            for key, value in given.items():
                if value is not None:
                    run[key] = value
            entity = {"id": "E", "name": "me"}
            project = {"id": "P", "name": given["project"], "entity": entity}
            bucket = {"id": "B", "name": given["name"], "displayName": run.get("displayName"), "config": "{}"}
            more = {"description": None, "sweepName": None, "historyLineCount": 0, "project": project}
            answer = {"upsertBucket": {"bucket": {**bucket, **more}, "inserted": True}}
        elif "CreateRunFiles" in asked:
            files = [{"name": name, "uploadUrl": f"{self.server.url}/up/{name}"} for name in given["files"]]
            answer = {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": files}}
        self._say({"data": answer})

    def _stream(self, run: str, body: dict[str, Any]) -> dict[str, Any]:
        told = (body.get("files") or {}).get("wandb-history.jsonl")
        if told and not told["offset"]:
            self.server.history[run] = {}  # as a run that is begun anew
        if told:
            for at, line in enumerate(told["content"], told["offset"]):
                self.server.history[run][at] = json.loads(line)
        self.server.complete[run] = bool(body.get("complete"))
        return {"exitcode": None, "limits": {}}


@contextmanager
def serving() -> Iterator[Server]:
    """Such a server, for the time of the block."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
