"""A place for files that is named by a URL: a bucket of S3 or of Google's, or a folder (``file://``)."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from trainkit import reading
from trainkit.errors import UserError

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_SECONDS = 20.0
_PART = 16 << 20
_SLOWEST_PART = 300.0
"""Seconds in which one of four parts must have gone through: 0.2 MB/s."""
_LONGEST = 400


class StoreError(Exception):
    """The place does not answer, or refuses. It may be another in a minute."""


class AbsentError(StoreError):
    """There is no such file."""


class Store:
    """Files below a URL, by their names relative to it. Credentials are those of the environment.

    Every method raises StoreError, whatever the library of the place raises.

    Args:
        seconds: to connect, and between a request and its answer.
        slowest_part: seconds without any part of a file going through, after which it is given up.

    Raises:
        UserError: the package for this kind of place is not installed.
    """

    def __init__(self, url: str, *, seconds: float = _SECONDS, slowest_part: float = _SLOWEST_PART) -> None:
        self.url = url.rstrip("/")
        scheme, _, self._root = self.url.partition("://")
        package = _PACKAGES.get(scheme, "fsspec")
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"{scheme}:// needs the package {package}.",
                why="It is not installed where the run is.",
                fix=f"pip install {package}",
                key="checkpoint.remote",
            )
        import fsspec

        options: dict[str, Any] = {"skip_instance_cache": True}
        if scheme == "s3":
            # Few parts at a time: each is in memory. Tries are counted by whoever uploads, who knows about the others.
            limits = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"max_attempts": 0}}
            options |= {"config_kwargs": limits, "use_listings_cache": False, "max_concurrency": 4}
        elif scheme == "gs":
            options |= {"use_listings_cache": False, "timeout": seconds}
        else:
            options |= {"auto_mkdir": True}
        self._seconds, self._slowest_part = 4 * seconds, slowest_part
        self._put_options = {"chunksize": _PART} if scheme == "s3" else {}
        self._fs: Any = fsspec.filesystem(scheme, **options)
        if scheme == "s3":
            self._fs.retries = 2

    def put(self, file: Path, name: str) -> None:
        """Send a file, which replaces one of that name."""
        # That it is not here is no matter of the place. What is open is sent, and no link that took its name meanwhile.
        with reading.open_regular(file) as content:
            opened = f"/dev/fd/{content.fileno()}"
            self._sent("put_file", name, opened, self._path(name), limit=self._slowest_part, **self._put_options)

    def write(self, content: bytes, name: str) -> None:
        """Send a small file, at once."""
        self._sent("pipe_file", name, self._path(name), content, limit=self._seconds + len(content) / 100_000)

    def read(self, name: str, *, limit: int) -> bytes:
        """A small file. Raises AbsentError where there is none."""
        content = self._read(name, 0, limit + 1)
        if len(content) > limit:
            raise StoreError(f"{self.url}/{name} is longer than {limit} bytes")
        return content

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The first ``size`` bytes of a file, or as many as it has, part by part."""
        for start in range(0, size, _PART):
            wanted = min(_PART, size - start)
            block = self._read(name, start, start + wanted)
            yield block
            if len(block) < wanted:
                return

    def names(self, folder: str = "") -> list[str]:
        """Names of files and folders in a folder; none where there is no such folder."""
        path = self._path(folder) if folder else self._root
        try:
            listed = self._call("ls", folder, path, limit=self._seconds, detail=False)
        except AbsentError:
            return []
        found = (str(item).rstrip("/") for item in listed)
        return [item.rpartition("/")[2] for item in found if not item.endswith(path.rstrip("/"))]

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            self._call("rm_file", name, self._path(name), limit=self._seconds)
        except AbsentError:
            return

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder; buckets have none."""
        if not self._fs.async_impl:
            self._call("rmdir", name, self._path(name), limit=self._seconds)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read(self, name: str, start: int, end: int) -> bytes:
        limit = self._slowest_part if end - start > _PART // 2 else self._seconds
        return bytes(self._call("cat_file", name, self._path(name), limit=limit, start=start, end=end))

    def _sent(self, method: str, name: str, *values: Any, limit: float, **options: Any) -> None:
        try:
            self._call(method, name, *values, limit=limit, **options)
        except AbsentError as error:  # no such bucket
            raise StoreError(str(error)) from None

    def _call(self, method: str, name: str, *values: Any, limit: float, **options: Any) -> Any:
        """One request, or several of a file in parts; given up when nothing has gone through for ``limit`` seconds."""
        try:
            if not self._fs.async_impl:
                return getattr(self._fs, method)(*values, **options)
            return self._awaited(method, *values, limit=limit, **options)
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise AbsentError(f"{self.url}/{name}: {_words(error) or 'there is no such file'}") from None
        # botocore's, aiohttp's, gcsfs' and asyncio's have nothing in common.
        except Exception as error:
            raise StoreError(f"{type(error).__name__}: {_words(error)}".removesuffix(": ")) from error

    def _awaited(self, method: str, *values: Any, limit: float, **options: Any) -> Any:
        # The libraries' own limits do not hold everywhere: who sends waits for "100 Continue" for ever.
        from fsspec.callbacks import Callback

        moved = time.monotonic()

        def note(size: int | None, value: int) -> None:
            nonlocal moved
            moved = time.monotonic()

        if method == "put_file":
            options["callback"] = Callback(hooks={"note": note})
        future = asyncio.run_coroutine_threadsafe(getattr(self._fs, f"_{method}")(*values, **options), self._fs.loop)
        while not future.done():
            done, _ = wait([future], timeout=min(1.0, limit))
            if not done and time.monotonic() - moved > limit:
                future.cancel()
                raise StoreError(f"nothing has gone through for {limit:.0f} seconds")
        return future.result()


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST].rstrip(".")
