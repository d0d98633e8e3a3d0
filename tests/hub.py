"""A stand-in for the Hugging Face Hub on loopback: it keeps what is sent to it, by its REST API."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml


class Hub(ThreadingHTTPServer):
    """Takes models of anybody who has the token ``right``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.made: list[dict[str, Any]] = []
        """Repositories as they were asked for."""
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.large: dict[str, str] = {}
        self.commits: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words: Any) -> None:
        pass

    def _answer(self, content: Any = None, code: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode() if content is not None else b""
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def do_HEAD(self) -> None:
        name = self.path.partition("/resolve/main/")[2]
        if name in self.server.files:
            return self._answer(code=200, ETag='"1"', X_Repo_Commit="a" * 40)
        return self._answer(code=404, X_Error_Code="EntryNotFound")

    def do_GET(self) -> None:
        self._answer({"id": "me/net", "sha": "a" * 40, "siblings": []})

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != "Bearer right" and not self.path.endswith("/batch"):
            return self._answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            return self._answer({"url": f"{self.server.url}/me/net", "name": "me/net"})
        if self.path == "/api/validate-yaml":
            head = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return self._answer({"errors": [] if head["pipeline_tag"] else ["none"], "warnings": []})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = {name: "regular" if name.endswith((".md", ".json")) else "lfs" for name in names}
            return self._answer(
                {"files": [{"path": n, "uploadMode": k, "shouldIgnore": False} for n, k in kinds.items()]}
            )
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**found, "actions": {"upload": {"href": f"{self.server.url}/blob/{found['oid']}", "header": {}}}}
                for found in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.server.commits.append(value["summary"])
                elif line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.blobs[value["oid"]]
            return self._answer(
                {"success": True, "commitOid": "a" * 40, "commitUrl": f"{self.server.url}/me/net/commit/a"}
            )
        return self._answer({"error": self.path}, 404)


@contextmanager
def hub() -> Iterator[Hub]:
    """The stand-in, while the block lasts."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
