from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.checkpoint.bucket import Trouble, troubled
from trainkit.ranks import free_port


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
