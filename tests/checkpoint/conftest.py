"""An S3 server on loopback that can be told to fail: refuse, stall, or cut connections in the middle."""

import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from trainkit.common.hosts import free_port


@dataclass
class Trouble:
    """What happens to connections from now on."""

    refuse: bool = False
    stall: bool = False
    cut_after: int | None = None
    """Bytes of a request after which its connection is cut."""

    def over(self) -> None:
        """All is well again."""
        self.refuse = self.stall = False
        self.cut_after = None


def _pump(source: socket.socket, target: socket.socket, is_request: bool, trouble: Trouble) -> None:
    passed = 0
    with suppress(OSError):
        while data := source.recv(1 << 16):
            while trouble.stall:
                time.sleep(0.02)
            passed += len(data)
            if is_request and trouble.cut_after is not None and passed > trouble.cut_after:
                break
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def _serve(listener: socket.socket, port: int, trouble: Trouble) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            if trouble.refuse:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", port))
            for way in ((client, server, True), (server, client, False)):
                threading.Thread(target=_pump, args=(*way, trouble), daemon=True).start()


@contextmanager
def troubled(port: int) -> Iterator[tuple[int, Trouble]]:
    """A port in front of ``port``, and what happens to those that come through it."""
    trouble = Trouble()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, port, trouble), daemon=True).start()
        yield listener.getsockname()[1], trouble
        trouble.over()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """moto's S3, which speaks the API over HTTP, in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield port
        finally:
            server.kill()


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Trouble]]:
    """URL of an empty bucket, and the trouble on the way to it."""
    with troubled(s3_port) as (port, trouble):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-a-test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-a-test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        name = f"runs-{port}"
        request = urllib.request.Request(f"http://127.0.0.1:{s3_port}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield f"s3://{name}/of/us", trouble
