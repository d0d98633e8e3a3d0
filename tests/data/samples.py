"""Data sets for tests: by their settings, and folders of images."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

from trainkit.config.schema import DataConfig
from trainkit.data import build_data
from trainkit.data.base import Splits


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


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """URL of a server on this machine that has the files of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
