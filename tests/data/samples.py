"""Data sets for tests: by their settings, and folders of images."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from trainkit.config.schema import DataConfig
from trainkit.data.base import Samples, Splits
from trainkit.data.datasets import digits
from trainkit.data.registry import build_data, check_data, counts_of, look_at_data


def choice(name: str = "digits", root: Path | str = "nowhere", **options: Any) -> DataConfig:
    return DataConfig.model_validate({"name": name, "root": str(root), **options})


def build(name: str, root: Path | str = "nowhere", **options: Any) -> Splits:
    return build_data(choice(name, root, **options))


def write_images(
    folder: Path, counts: Mapping[str, int], *, suffix: str = "jpg", size: tuple[int, int] = (20, 16)
) -> None:
    """Write FOLDER/CLASS/NUMBER.SUFFIX, ``counts`` of each class, in a colour of its own."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            colour = (40 + 60 * label, 10 * number % 256, 128)
            Image.new("RGB", size, colour).save(folder / name / f"{number:03}.{suffix}")


def write_digits(folder: Path, classes: str) -> None:
    """Write the test split of `digits` as FOLDER/CLASS/NUMBER.png; ``classes`` has a ``{}`` for the digit."""
    test = digits.build(folder).test
    for index in range(len(test)):
        pixels, label = test[index]
        place = folder / classes.format(label)
        place.mkdir(exist_ok=True)
        Image.fromarray(pixels[0].numpy()).save(place / f"{index}.png")


def fill(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.touch()


def looked_at(name: str, root: Path) -> Sequence[str]:
    config = choice(name, root)
    check_data(config)
    return look_at_data(config)


def counted(config: DataConfig) -> list[int | None]:
    """Count classes, and images of train, val and test; of a test that val stands in for those of val."""
    counts = counts_of(config)
    test = "val" if counts["test"].note == "none; val is used instead" else "test"
    return [counts["train"].classes, *(counts[split].images for split in ("train", "val", test))]


def trained(config: DataConfig, data: Splits | None = None) -> list[int]:
    """Count the same of what training has."""
    if data is None:
        look_at_data(config)
        data = build_data(config)
    return [data.info.num_classes, *sizes(data)]


def sizes(data: Splits) -> list[int]:
    return [len(split) for split in (data.train, data.val, data.test)]


def labels(samples: Samples) -> list[int]:
    return [samples[index][1] for index in range(len(samples))]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def serving(folder: Path) -> AbstractContextManager[str]:
    """URL of a server on this machine that has the files of a folder."""
    return listening(partial(_Quiet, directory=str(folder)))


@contextmanager
def listening(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """URL of a server on this machine that answers as ``handler`` does."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:  # or pytest waits for the thread for ever once a test has failed
            server.shutdown()
            thread.join()


def hub(files: dict[str, bytes], dataset: str = "me/pets") -> AbstractContextManager[str]:
    """URL of a stand-in for the hub: what its client asks of a data set."""

    def about(name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(files[name]), "oid": name}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
            found = [about(name) for name in files if name in asked or quote(name, safe="") in asked]
            self._answer(json.dumps(found).encode(), "")

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.partition("/resolve/main/")[2]
            below = path.partition(f"/api/datasets/{dataset}/tree/")[2].partition("/")[2]
            if path.startswith(f"/api/datasets/{dataset}/tree/"):
                content = json.dumps([about(name) for name in files if name.startswith(below)]).encode()
            elif path == f"/api/datasets/{dataset}":
                content = json.dumps({"id": dataset, "sha": "0" * 40}).encode()
            elif path.startswith(f"/datasets/{dataset}/") and name in files:
                content = files[name]
            else:
                self.send_error(404)
                return
            self._answer(content, name)

        def _answer(self, content: bytes, name: str) -> None:
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            self.send_response(206 if part else 200)
            if part:
                content = content[int(part[1]) : int(part[2]) + 1]
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{len(content)}-{hash(name)}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    return listening(Handler)
