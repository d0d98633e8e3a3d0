"""Answers of a web server are read to the bound of the question, whatever it sends."""

import gzip
import hashlib
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainkit.common.object_store import AbsentError, Store, StoreError

CONTENT = bytes(range(256)) * 16


class Odd(ThreadingHTTPServer):
    """Answers each GET as it is told, and counts the bytes that it could send."""

    daemon_threads = True
    status = 206
    headers: dict[str, str] = {}  # noqa: RUF012  each test sets its own
    body: Callable[[int, int], bytes | memoryview]
    """Gives the content from the first to the last byte that was asked for."""
    is_endless = False
    sent = 0
    asked: list[Any]


class _Handler(BaseHTTPRequestHandler):
    server: Odd

    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(self.headers)
        first, _, last = (self.headers["Range"] or "bytes=0-4095").removeprefix("bytes=").partition("-")
        self.send_response(server.status)
        for name, value in server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # whoever asked has heard enough
            while True:
                body = server.body(int(first), int(last))
                self.wfile.write(body)
                server.sent += len(body)
                if not server.is_endless:
                    break
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[Odd]:
    with Odd(("127.0.0.1", 0), _Handler) as server:
        server.asked, server.headers = [], {}
        server.body = lambda first, last: CONTENT[first : last + 1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def store(server: Odd) -> Store:
    return Store(f"http://127.0.0.1:{server.server_port}", key="data.url")


def test_a_part_is_what_was_asked_for_without_compression(server: Odd, store: Store) -> None:
    assert b"".join(store.blocks("x", 300)) == CONTENT[:300]
    assert {headers["Accept-Encoding"] for headers in server.asked} == {"identity"}
    server.body = lambda first, last: CONTENT[:7]
    assert list(store.blocks("x", 300)) == [CONTENT[:7]], "the file has no more"


def test_a_server_without_parts_gives_the_beginning_of_a_whole_file(server: Odd, store: Store) -> None:
    server.status, server.body = 200, lambda first, last: CONTENT
    assert list(store.blocks("x", 300)) == [CONTENT[:300]]
    with pytest.raises(StoreError, match="the whole file instead of the requested part"):
        store._read("x", 10, 20)


@pytest.mark.parametrize("status", [200, 206])
def test_an_answer_without_end_is_read_to_the_bound(server: Odd, store: Store, status: int) -> None:
    server.status, server.is_endless, server.body = status, True, lambda first, last: bytes(1 << 16)
    if status == 200:
        assert store.blocks("x", 1 << 16).__next__() == bytes(1 << 16)
    else:
        with pytest.raises(StoreError, match="more than was requested"):
            next(store.blocks("x", 1 << 16))
    with pytest.raises(StoreError, match="more than was requested"):
        store.names("")
    assert server.sent < 40 << 20


@pytest.mark.parametrize("what", ["part", "listing"])
def test_a_compressed_answer_is_refused_and_not_unpacked(server: Odd, store: Store, what: str) -> None:
    server.headers = {"Content-Encoding": "gzip"}
    server.body = lambda first, last: gzip.compress(bytes(1 << 20))
    with pytest.raises(StoreError, match="compressed"):
        store.names("") if what == "listing" else next(store.blocks("x", 300))


def test_a_listing_names_what_lies_just_there(server: Odd, store: Store) -> None:
    url = store.url
    links = [
        '<a href="train-0.tar">x</a>', "<A class=a HREF='/train-1.tar'>x</A>", "<a href=train%202.tar>x</a>",
        '<a href="../up.tar">', f'<a href="{url}/train-3.tar?sig=1">', '<a href="http://eve.example/train-4.tar">',
        '<a href="//eve.example/5.tar">', '<a href="/">',
    ]  # fmt: skip
    page = "\n".join(links)
    server.status, server.body = 200, lambda first, last: page.encode()
    assert store.names("") == ["train-0.tar", "train-1.tar", "train%202.tar", "up.tar", "train-3.tar"]
    assert store.names("train") == ["train-0.tar", "train%202.tar"], "the others lie above it"


def test_what_is_not_there_is_absent(server: Odd, store: Store) -> None:
    server.status = 404
    with pytest.raises(AbsentError):
        store.read("x", limit=10)
    assert store.names("") == []


def test_what_breaks_off_goes_on_from_there_with_little_in_memory(server: Odd, store: Store) -> None:
    content = memoryview(bytes(range(256)) * (24 << 12))  # the server, which is of this process too, copies nothing
    half = len(content) // 2

    def cut_once(first: int, last: int) -> memoryview:
        server.headers = {}
        return content[:half] if len(server.asked) == 1 else content[first : last + 1]

    server.headers, server.body = {"Content-Length": str(len(content))}, cut_once
    got = hashlib.sha256()
    tracemalloc.start()
    try:
        with store.patiently():
            for block in store.blocks("x", len(content)):
                got.update(block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got.digest() == hashlib.sha256(content).digest()
    starts = [int(headers["Range"].removeprefix("bytes=").partition("-")[0]) for headers in server.asked]
    assert starts[0] == 0
    assert len(starts) == 2
    assert 0 < starts[1] <= half  # what has come and was not read yet when it broke off is asked for again
    assert peak < len(content) // 2
