"""Files in a bucket, in a folder or on a web server, by their URLs: requests that are bounded, and end."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

from trainkit.common import fileio
from trainkit.common.errors import require_package

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp"}
_EXTRAS = {"gs": "gcs", "http": "https"}
_PART = 16 << 20
_BLOCK = 1 << 20
"""Bytes of an answer that are read at a time. Much larger ones are new memory each time, which the system clears: that
took two thirds of the CPU time of reading a bucket."""
LONGEST_OBJECT = 1 << 16
"""Bytes of a small file."""
_FETCH_TRIES = 6
_FETCH_PAUSE = 0.5
_VERSIONS = ("size", "mtime", "ETag", "etag", "LastModified", "updated", "blob_id")
"""Facts by which kinds of places tell a file from another one of its name."""


_LONGEST_LISTING = 16 << 20
"""Bytes of a web server's page of links: a hundred thousand of them."""
_LINK = re.compile(rb"""<a\s[^>]*?href\s*=\s*["']?([^"'\s>#?]+)""", re.IGNORECASE)


class StoreError(Exception):
    """The place does not answer, or refuses. It may be back in a minute."""


class AbsentError(StoreError):
    """There is no such file."""


class TooMuchError(StoreError):
    """More came than was asked for: another file is there, or something that is no file store."""

    def __init__(self) -> None:
        super().__init__("it sends more than was requested")


class Store:
    """Files below a URL, by their names relative to it: of S3, of Google's, or of a folder (``file://``); to be read
    also those of the Hugging Face hub (``hf://``) and of web servers.

    Credentials are those of the environment. Every method raises StoreError, whatever the library of the place raises.

    Args:
        seconds: to connect, and between a request and its answer, as far as the library of the place keeps to that.
        patience: seconds without an answer, or any part of a file going through, after which a request is given up.
        key: the setting that names the place, for errors.

    Raises:
        UserError: the package for this kind of place is not installed.
    """

    def __init__(
        self, url: str, *, seconds: float = 20.0, patience: float = 300.0, key: str = "checkpoint.remote"
    ) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._tries = 1
        scheme, _, self._root = self.url.partition("://")
        package = _PACKAGES.get(scheme, "fsspec")
        extra = _EXTRAS.get(scheme, scheme)
        require_package(package, f"{scheme}:// needs the package {package}.", extra=extra, key=key)
        import fsspec

        options: dict[str, Any] = {"auto_mkdir": True}
        if scheme == "s3":
            # Few parts at a time: each is in memory. s3fs tries again by itself, and botocore need not do so as well.
            limits = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"max_attempts": 0}}
            options = {"config_kwargs": limits, "use_listings_cache": False, "max_concurrency": 4}
        elif scheme == "gs":
            options = {"use_listings_cache": False, "timeout": seconds}
        elif package == "aiohttp":
            from aiohttp import ClientTimeout

            limit = ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
            options = {"client_kwargs": {"timeout": limit, "auto_decompress": False}}
            self._root = self.url
        self._put_options = {"chunksize": _PART} if scheme == "s3" else {}
        self._fs: Any = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
        self._own: _Web | _S3 | None = None
        if scheme == "s3":
            self._own = _S3(self._fs)
        elif package == "aiohttp":
            self._own = _Web(self._fs)

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """In the block each request has six tries, with pauses of 0.5 to 8 seconds: the place may refuse for a moment.

        For a file that is absent there is one.
        """
        self._tries = _FETCH_TRIES
        try:
            yield
        finally:
            self._tries = 1

    def put(self, file: Path, name: str) -> None:
        """Send a file, which replaces one of that name."""
        try:
            content = fileio.open_regular(file)
        except FileNotFoundError:  # any other error of opening it is not one of the place
            raise StoreError(f"{file} was deleted meanwhile") from None
        with content:  # the open file is sent, not a link that took its name since
            self._call("put_file", f"/dev/fd/{content.fileno()}", self._path(name), **self._put_options)

    def write(self, content: bytes, name: str) -> None:
        """Send a small file, at once."""
        self._call("pipe_file", self._path(name), content)

    def read(self, name: str, *, limit: int) -> bytes:
        """A small file. Raises AbsentError where there is none."""
        content = self._read(name, 0, limit + 1)
        if len(content) > limit:
            raise StoreError(f"{self.url}/{name} is longer than {limit} bytes")
        return content

    def size(self, name: str) -> int:
        """Bytes of a file. Raises AbsentError where there is none."""
        found = self._call("info", self._path(name)).get("size")
        if type(found) is not int:
            raise StoreError(f"{self.url}/{name} does not say how long it is")
        return found

    def version(self, name: str) -> str:
        """A text that changes when the file does, as far as its place tells. Raises AbsentError where there is none."""
        about = self._call("info", self._path(name))
        return repr(list(map(about.get, _VERSIONS)))

    def read_object(self, name: str) -> Mapping[str, Any]:
        """A small JSON object; empty where there is none."""
        with suppress(AbsentError):
            return fileio.parse_object(self.read(name, limit=LONGEST_OBJECT)) or {}
        return {}

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The first ``size`` bytes of a file, or as many as it has, part by part."""
        if self._own is not None:
            yield from self._streamed(self._path(name), size)
            return
        for start in range(0, size, _PART):
            end = min(start + _PART, size)
            block = self._read(name, start, end)
            yield block
            if len(block) < end - start:
                return

    def _streamed(self, path: str, size: int) -> Iterator[bytes]:
        """The same, of one answer at a time: what it breaks off is requested again from there."""
        at = 0
        tried = 0
        while at < size:
            part = None
            try:
                part = self._once("open_part", path, at, size)
                block = self._once("read_block", part, size - at)
                while block:
                    at += len(block)
                    tried = 0
                    yield block
                    block = self._once("read_block", part, size - at)
                return
            except StoreError as error:
                tried += 1
                if tried >= self._tries or isinstance(error, AbsentError):
                    raise
            finally:
                if part is not None:
                    self._fs.loop.call_soon_threadsafe(part.close)
            time.sleep(_FETCH_PAUSE * 2 ** (tried - 1))

    def names(self, folder: str) -> list[str]:
        """Names of files and folders in a folder; none where there is no such folder."""
        path = self._path(folder)
        with suppress(AbsentError):
            listed = [str(item).rstrip("/") for item in self._call("ls", path, detail=False)]
            return [item.rpartition("/")[2] for item in listed if not item.endswith(path)]
        return []

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(AbsentError):
            self._call("rm_file", self._path(name))

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder; buckets have none."""
        if not self._fs.async_impl:
            self._call("rmdir", self._path(folder))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read(self, name: str, start: int, end: int) -> bytes:
        content = bytes(self._call("cat_file", self._path(name), start=start, end=end))
        if len(content) > end - start:
            raise TooMuchError
        return content

    def _call(self, method: str, *values: Any, **options: Any) -> Any:
        """One request, or several of a file in parts; again where it fails, as `patiently` says."""
        tried = 1
        while tried < self._tries:
            try:
                return self._once(method, *values, **options)
            except AbsentError:
                raise
            except StoreError:
                time.sleep(_FETCH_PAUSE * 2 ** (tried - 1))
                tried += 1
        return self._once(method, *values, **options)

    def _once(self, method: str, *values: Any, **options: Any) -> Any:
        try:
            if self._fs.async_impl:
                return self._awaited(method, *values, **options)
            return getattr(self._fs, method)(*values, **options)
        except StoreError:
            raise
        except Exception as error:  # botocore's, aiohttp's, gcsfs' and asyncio's have nothing in common
            words = " ".join(str(error).split())[:400].rstrip(".")
            if isinstance(error, FileNotFoundError) and method not in ("put_file", "pipe_file"):
                raise AbsentError(f"{values[0]}: {words or 'there is no such file'}") from None
            raise StoreError(f"{type(error).__name__}: {words}".removesuffix(": ")) from error

    def _awaited(self, method: str, *values: Any, **options: Any) -> Any:
        # The libraries' own limits do not hold everywhere: a sender waits for "100 Continue" for ever.
        from fsspec.callbacks import Callback

        moved = time.monotonic()

        def note(size: int | None, value: int) -> None:
            nonlocal moved
            moved = time.monotonic()

        if method == "put_file":
            options["callback"] = Callback(hooks={"note": note})
        does = getattr(self._own, f"_{method}", None) or getattr(self._fs, f"_{method}")
        future = asyncio.run_coroutine_threadsafe(does(*values, **options), self._fs.loop)
        while not wait([future], timeout=min(1.0, self._patience)).done:
            if time.monotonic() - moved > self._patience:
                future.cancel()
                raise TimeoutError(f"no data has gone through for {self._patience:.0f} seconds")
        return future.result()


class _Part(NamedTuple):
    """An answer that is read as it comes."""

    read: Callable[[int], Awaitable[bytes]]
    close: Callable[[], None]
    is_bounded: bool
    """Nothing follows what was requested."""


class _Parts:
    """Answers that are read block by block.

    Args:
        fs: fsspec's, whose session is used.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    async def _read_block(self, part: _Part, most: int) -> bytes:
        """The next block, of at most ``most`` bytes, or nothing at the end. Raises TooMuchError where more come."""
        pieces = []
        left = min(most, _BLOCK)
        while left:
            piece = await part.read(left)
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
        if most <= _BLOCK and not left and part.is_bounded and await part.read(1):
            raise TooMuchError
        return b"".join(pieces)


class _S3(_Parts):
    """Parts of S3's files. s3fs reads an answer whole, in memory that the system clears anew for each."""

    async def _open_part(self, path: str, start: int, end: int) -> _Part:
        bucket, key, _ = self._fs.split_path(path)
        answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        body = answer["Body"]
        return _Part(body.read, body.close, is_bounded=True)


class _Web(_Parts):
    """Requests to a web server whose answers are read to a bound. fsspec reads them whole, and unpacks compressed ones:
    a stranger's server decides then how much memory that takes.
    """

    async def _cat_file(self, url: str, start: int, end: int) -> bytes:
        return await self._get(url, end - start, start)

    async def _ls(self, url: str, *, detail: bool) -> list[str]:
        """List the links of a page that lead to what lies just below it."""
        folder = url.rstrip("/") + "/"
        page = await self._get(folder, _LONGEST_LISTING)
        found = [urljoin(folder, link.decode(errors="replace")) for link in _LINK.findall(page)]
        return [link for link in dict.fromkeys(found) if link.startswith(folder) and link != folder]

    async def _get(self, url: str, most: int, start: int | None = None) -> bytes:
        """At most ``most`` bytes from ``start`` on; None: the whole, which is no longer."""
        part = await self._open(url, most, start)
        try:
            found = bytearray()
            block = await self._read_block(part, most)
            while block:
                found += block
                block = await self._read_block(part, most - len(found))
            return bytes(found)
        finally:
            part.close()

    async def _open_part(self, url: str, start: int, end: int) -> _Part:
        return await self._open(url, end - start, start)

    async def _open(self, url: str, most: int, start: int | None) -> _Part:
        headers = {"Accept-Encoding": "identity"}
        if start is not None:
            headers["Range"] = f"bytes={start}-{start + most - 1}"
        session = await self._fs.set_session()
        answer = await session.get(self._fs.encode_url(url), headers=headers)
        try:
            if answer.status == 404:
                raise FileNotFoundError(url)
            answer.raise_for_status()
            if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise StoreError("it sends the file compressed, although it was requested uncompressed")
            if start and answer.status != 206:
                raise StoreError("it sends the whole file instead of the requested part")
        except BaseException:
            answer.close()
            raise
        # A server that knows no parts sends the whole file, of which this is the beginning.
        return _Part(answer.content.read, answer.close, is_bounded=start is None or answer.status == 206)
