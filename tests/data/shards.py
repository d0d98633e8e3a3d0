"""Shards for tests: on a web server of this machine that may be slow, be away, cut its answers and lie."""

import io
import re
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from trainkit.data.base import Splits
from trainkit.data.loader import Loading, train_batches
from trainkit.data.registry import prepare_data

CLASSES = ("cat", "dog", "emu")
PER_SHARD = 10
SHARDS = 6


class Place(ThreadingHTTPServer):
    """A web server that has the files of a folder; it may be slow, be away, cut its answers and lie."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        """Names of the files whose content was asked for."""
        self.seconds = 0.0
        self.trouble: Callable[[bytes], bytes | None] = lambda content: content
        """Changes an answer; None breaks it off."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def asked_for(self, split: str) -> Counter[str]:
        return Counter(name for name in self.asked if name.startswith(split))


class _Handler(BaseHTTPRequestHandler):
    server: Place

    def log_message(self, *words: Any) -> None:
        pass

    def _answer(self, code: int, content: bytes, length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def do_HEAD(self) -> None:
        file = self.server.folder / self.path.lstrip("/")
        self._answer(200, b"", file.stat().st_size) if file.is_file() else self._answer(404, b"")

    def do_GET(self) -> None:
        name, server = self.path.lstrip("/"), self.server
        if not name:
            links = "".join(f'<a href="{file.name}">x</a>' for file in sorted(server.folder.iterdir()))
            self._answer(200, links.encode())
            return
        server.asked.append(name)
        time.sleep(server.seconds)
        if not (server.folder / name).is_file():
            self._answer(404, b"")
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        content = (server.folder / name).read_bytes()[int(found[1]) : int(found[2]) + 1]
        told = server.trouble(content)
        if told is None:  # half of it, and no more
            self._answer(206, content[: len(content) // 2], len(content))
            self.connection.close()
            return
        self._answer(206, told) if told else self._answer(503, b"")


def write_shard(file: Path, members: dict[str, bytes]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(tar_file(members))
    return file


def tar_file(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        add(tar, members)
    return out.getvalue()


def add(tar: tarfile.TarFile, members: dict[str, bytes]) -> None:
    for name, content in members.items():
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def picture(number: int) -> bytes:
    out = io.BytesIO()
    pixels = numpy.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


PNG = picture(0)


def options(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "image_size": 16, "augment": False, "shuffle_block": 2, "patience": 20.0, **more}


def read(
    data: Splits, start: int = 0, stop: int = 15, *, size: int = 12, rank: int = 0, ranks: int = 1, **more: Any
) -> list[Any]:
    """Images and labels of the batches from ``start`` to ``stop``; of 12 images there are five an epoch."""
    sizes = {"global_batch_size": size, "micro_batch_size": size // ranks}
    with train_batches(data, Loading(rank, ranks, **more), seed=5, steps=range(start, stop), **sizes) as batches:
        return [(batch.images.clone(), batch.labels.tolist()) for batch in batches]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all(torch.equal(mine[0], other[0]) and mine[1] == other[1] for mine, other in pairs)


def joined(parts: list[list[Any]]) -> list[Any]:
    """The batches of all ranks, each step in one."""
    found: list[Any] = []
    for step in zip(*parts, strict=True):
        images, labels = zip(*step, strict=True)
        found.append((torch.cat(images), [*chain.from_iterable(labels)]))
    return found


def indexed(shards: Path | str, root: Path, **given: Any) -> Path:
    """``root`` with the index of some shards."""
    prepare_data("stream", root, [], lambda line: None, {"url": str(shards), **given})
    return root
