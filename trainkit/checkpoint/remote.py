"""A run's copy in a bucket or another folder (`checkpoint.remote`): its files, and a client for the place.

    s3://bucket/prefix/RUN/remote.json                  whose it is: a number that the run's folder has, too
                           config.yaml manifest.json plan.json code.tar.gz
                           metrics.jsonl task.json evaluations.jsonl events.jsonl summary.json confusion.json
                           mistakes-*.json
                           checkpoints/step-00001000/   as in the run folder; state.json is sent last
                           pointers.json                what `latest` and `best` name, both whole

A checkpoint whose ``state.json`` is there is complete: it is the last to be sent and the first to be removed. It says
what the other files must be, so that what comes back is compared with what was written.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.checkpoint import format
from trainkit.checkpoint.format import LONGEST, Record, parse
from trainkit.errors import UserError
from trainkit.run.folder import RunDir

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_SECONDS = 20.0
_PART = 16 << 20
_SLOWEST_PART = 300.0
"""Seconds in which one of four parts must have gone through: 0.2 MB/s."""
_LONGEST = 400


class StoreError(Exception):
    """The place does not answer, or refuses. It may be back in a minute."""


class AbsentError(StoreError):
    """There is no such file."""


class Store:
    """Files below a URL, by their names relative to it: of S3, of Google's, or of a folder (``file://``).

    Credentials are those of the environment. Every method raises StoreError, whatever the library of the place raises.

    Args:
        seconds: to connect, and between a request and its answer.
        slowest_part: seconds without any part of a file going through, after which it is given up.
        tries: of each request, with pauses of 0.5, 1, 2, ... seconds; for a file that is absent there is one.

    Raises:
        UserError: the package for this kind of place is not installed.
    """

    def __init__(
        self, url: str, *, seconds: float = _SECONDS, slowest_part: float = _SLOWEST_PART, tries: int = 1
    ) -> None:
        self.url, self._tries = url.rstrip("/"), tries
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
            # Few parts at a time: each is in memory. Tries are counted here and by the uploads, and not by botocore.
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
        # An error of opening it is not one of the place. The open file is sent, not a link that took its name since.
        with fileio.open_regular(file) as content:
            opened = f"/dev/fd/{content.fileno()}"
            self._call("put_file", name, opened, self._path(name), limit=self._slowest_part, **self._put_options)

    def write(self, content: bytes, name: str) -> None:
        """Send a small file, at once."""
        self._call("pipe_file", name, self._path(name), content, limit=self._seconds + len(content) / 100_000)

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

    def _call(self, method: str, name: str, *values: Any, limit: float, **options: Any) -> Any:
        for tried in range(self._tries):
            try:
                return self._once(method, name, *values, limit=limit, **options)
            except AbsentError:
                raise
            except StoreError:
                if tried + 1 == self._tries:
                    raise
                time.sleep(2**tried / 2)
        raise AssertionError("there is a first try")

    def _once(self, method: str, name: str, *values: Any, limit: float, **options: Any) -> Any:
        """One request, or several of a file in parts; given up when nothing has gone through for ``limit`` seconds."""
        try:
            if not self._fs.async_impl:
                return getattr(self._fs, method)(*values, **options)
            return self._awaited(method, *values, limit=limit, **options)
        except StoreError:
            raise
        except FileNotFoundError as error:
            is_sent = method in ("put_file", "pipe_file")  # then the bucket is absent
            kind = StoreError if is_sent else AbsentError
            raise kind(f"{self.url}/{name}: {_words(error) or 'there is no such file'}") from None
        # botocore's, aiohttp's, gcsfs' and asyncio's have nothing in common.
        except Exception as error:
            raise StoreError(f"{type(error).__name__}: {_words(error)}".removesuffix(": ")) from error

    def _awaited(self, method: str, *values: Any, limit: float, **options: Any) -> Any:
        # The libraries' own limits do not hold everywhere: a sender waits for "100 Continue" for ever.
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


PLACE, POINTERS, CODE = "remote.json", "pointers.json", "code.tar.gz"
RUN_FILES = ("config.yaml", "manifest.json", "plan.json")
RECORDS = (
    *("metrics.jsonl", "task.json", "evaluations.jsonl", "events.jsonl", "summary.json", "confusion.json"),
    *("mistakes-val.json", "mistakes-test.json"),
)
_SMALL = 1 << 16
LONGEST_TEXT = 1 << 30
"""Bytes of a record that goes there and comes back."""
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Pointers:
    """Steps that ``latest`` and ``best`` name in a run's copy."""

    latest: int | None = None
    best: int | None = None

    @property
    def steps(self) -> list[int]:
        """Each once, ``latest`` first."""
        return list(dict.fromkeys(step for step in (self.latest, self.best) if step is not None))

    @classmethod
    def read(cls, store: Store) -> Pointers:
        """What is there; None for what is absent or unreadable. Raises StoreError."""
        told = small_object(store, POINTERS)
        found = {name: told.get(name) for name in ("latest", "best")}
        return cls(**{name: step for name, step in found.items() if type(step) is int and 0 <= step < 10**15})

    def write(self, store: Store) -> None:
        """Raises StoreError."""
        store.write(json.dumps({"latest": self.latest, "best": self.best}).encode(), POINTERS)


def folder_of(step: int) -> str:
    """Name of a checkpoint's folder in the copy."""
    return f"checkpoints/{format.path_of(Path(), step).name}"


def record_of(store: Store, step: int) -> Record:
    """The record of the copy's checkpoint of ``step``.

    Raises:
        StoreError: there is none, or the place does not answer.
        BrokenCheckpointError: it is no whole one.
    """
    return parse(store.read(f"{folder_of(step)}/state.json", limit=LONGEST), step)


def remove_step(store: Store, step: int) -> None:
    """Remove a checkpoint, which is incomplete from the first moment on. Raises StoreError."""
    folder = folder_of(step)
    store.remove(f"{folder}/state.json")
    for name in store.names(folder):
        store.remove(f"{folder}/{name}")
    store.remove_folder(folder)


def claim(remote: str, run: RunDir) -> Store:
    """The place of a run below ``remote``, which is found to be this run's, writable and readable.

    Raises:
        UserError: it cannot be reached, written or read; or another run is there.
    """
    own, remote = own_place(run), remote.rstrip("/")
    in_sweep = (run.path.parent / "sweep.json").is_file()
    url = f"{remote}/{run.path.parent.name}/{run.path.name}" if in_sweep else f"{remote}/{run.path.name}"
    if own and own["url"].startswith(f"{remote}/"):
        url = own["url"]
    number = own["id"] if own else uuid.uuid4().hex
    content = json.dumps({"id": number, "url": url}).encode()
    store = Store(url)
    try:
        there = small_object(store, PLACE)
        if there and there.get("id") != number:
            raise UserError(
                f"There is another run in {url} already.",
                why="It was not made by this run folder, and would be lost.",
                fix=f"Go on with it: `{terminal.command('resume', url)}`; or give another checkpoint.remote.",
                key="checkpoint.remote",
            )
        store.write(content, PLACE)
        if store.read(PLACE, limit=_SMALL) != content:
            raise StoreError("what was written there does not come back")
    except StoreError as error:
        raise unreachable(url, error) from None
    if own is None or own["url"] != url:
        fileio.write(run.path / PLACE, content, run.path)
    return store


def unreachable(url: str, error: StoreError) -> UserError:
    """The error for a place that does not do what it must."""
    return UserError(
        f"{url} cannot be used.",
        why=f"{error}.",
        fix="Check the bucket's name, its region, and the credentials in the environment (AWS_PROFILE or "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; GOOGLE_APPLICATION_CREDENTIALS).",
        key="checkpoint.remote",
    )


def own_place(run: RunDir) -> dict[str, str] | None:
    """Number and URL of the run's copy, as its folder says; None without such a copy."""
    try:
        told = fileio.parse_object(fileio.read_bytes(run.path / PLACE, _SMALL)) or {}
    except OSError:
        return None
    return told if isinstance(told.get("url"), str) and _ID.fullmatch(str(told.get("id"))) else None


def small_object(store: Store, name: str) -> Mapping[str, Any]:
    """A small JSON object; empty where there is none."""
    try:
        return fileio.parse_object(store.read(name, limit=_SMALL)) or {}
    except AbsentError:
        return {}
