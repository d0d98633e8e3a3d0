"""Whole shards of a store on the node's own disk, up to a limit: each is fetched once, whatever ranks and jobs of this
user are there.

A file has the hash of its content as its name, and that name only once all of it is there. Who fetches one holds its
lock, which the system lets go of when its holder is killed; the others wait for the file. What is needed longest ago is
removed first: needed by the order of the data, not by who happened to read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import RunFailedError, TrainkitError, UserError
from trainkit.common.object_store import AbsentError, Store, StoreError, TooMuchError
from trainkit.common.process import node_disk
from trainkit.data import parquet

LARGEST_SHARD = 1 << 35
_SHA256 = re.compile(r"[0-9a-f]{64}")
AT_ONCE = 4
"""Shards that a rank fetches ahead side by side."""
TRIES = 3
"""Attempts at a shard whose content is wrong: what is wrong three times has changed."""
QUIET_SECONDS = 10.0
"""A shard that does not come for so long is told of,"""
AGAIN_SECONDS = 60.0
"""and then so often."""
_LONGEST_PAUSE = 5.0


class Shard(NamedTuple):
    """A file of many samples, as it was when it was indexed."""

    name: str
    """Name below the URL."""
    size: int
    sha256: str
    kept: int
    """Bytes that it takes on a node's disk: of parquet its images alone, one after another."""
    columns: tuple[str, str] | None = None
    """Columns of the images and of the labels, in parquet."""

    @classmethod
    def checked(cls, name: str, size: int, sha256: str, kept: int, columns: Sequence[str] | None) -> Shard:
        """Check a shard as an index has it, which may be a stranger's. Its name and its hash become paths.

        Raises ValueError for what is none.
        """
        fileio.inside(Path(), name)
        if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
            raise ValueError(f"the hash of {name} is none")
        if not all(jsonl.is_whole(number) and number <= LARGEST_SHARD for number in (size, kept)):
            raise ValueError(f"{name} has no such size")
        if columns is None:
            if kept != size:
                raise ValueError(f"{name} takes {kept} bytes of {size}")
            return cls(name, size, sha256, kept)
        image, label = columns
        if not isinstance(image, str) or not isinstance(label, str):
            raise ValueError(f"{name} has no such columns")
        return cls(name, size, sha256, kept, (image, label))


class WrongContentError(Exception):
    """Something else came than what was indexed."""


@lru_cache(maxsize=4)
def _store(url: str, process: int) -> Store:
    """A process has a store of its own: connections do not outlive a fork."""
    return Store(url, patience=60.0, key="data.url")


class Cache:
    """Shards below ``url``. Tar files in a folder (``file://``) are read where they lie.

    Args:
        most: bytes that shards of all data sets take on this node's disk.
        unpacks: there is parquet among them, which is read nowhere as it lies.
        patience: seconds without a byte of a shard after which reading it fails.

    Raises UserError where its folder on this disk cannot be made, or is not this user's alone.
    """

    def __init__(self, url: str, most: int, patience: float, *, unpacks: bool) -> None:
        self.url = url
        self.most = most
        self.patience = patience
        self.waited: dict[str, float] = {}
        """Seconds that this process has waited for shards; who tells of them empties it."""
        self.tell: Callable[..., None] = lambda **waiting: None
        """Hook of a rank that speaks for its run: takes the ``file`` waited for, the ``seconds`` so far, and why."""
        self._rank = os.getpid()  # its loader processes have it by the fork
        self.is_near = url.startswith("file://") and not unpacks
        disk = node_disk() or Path(tempfile.gettempdir())
        self.folder = disk / f"trainkit-{os.geteuid()}" / "shards"
        if not self.is_near:
            if not fileio.make_own(self.folder.parent):
                what = f"{self.folder.parent} can be written by others."
                raise UserError(what, why="Shards of data are stored in it.", fix="Name a disk of this node in TMPDIR.")
            fileio.make_folder(self.folder)

    def read(self, shard: Shard, start: int, size: int) -> bytes:
        """A part of a shard, which is fetched if it is not here.

        Raises:
            UserError: it cannot be read, or is another than was indexed.
            RunFailedError: it does not come.
        """
        file = self._file(shard)
        if self.is_near:
            file = fileio.inside(Path(self.url[7:]), shard.name)
        while True:
            try:
                with fileio.open_regular(file, buffering=0, follow=self.is_near) as content:
                    return os.pread(content.fileno(), size, start)
            except FileNotFoundError as error:  # not here yet, or removed to make room
                if self.is_near:
                    raise _changed(self.url, shard, f"{error.strerror}") from None
                self.fetch(shard)
            except OSError as error:
                raise UserError(f"Cannot read {file}.", why=f"{error}.", fix="Check the disk that it is on.") from None

    def drop(self, shard: Shard) -> None:
        """Remove a damaged file of a shard. Raises UserError where it is the shard itself."""
        if self.is_near:
            raise _changed(self.url, shard, "Its content differs")
        self._file(shard).unlink(missing_ok=True)

    def fetch(self, shard: Shard, given_up: Callable[[], bool] | None = None) -> None:
        """Fetch a shard, unless it is here.

        Args:
            given_up: of one that is fetched ahead, with patience without end: asked now and then. None: somebody waits.
        """
        file = self._file(shard)
        began = time.time()
        pause = 0.1
        wrong = 0
        why = ""
        with fileio.append(self._lock_of(shard.sha256), self.folder) as lock:
            is_locked = _locked(lock)
            while not is_locked or not file.exists():
                if is_locked:
                    try:
                        self._download(shard, file, lock, began, given_up)
                        continue
                    except (WrongContentError, AbsentError, TooMuchError) as error:
                        wrong += 1
                        why = str(error)
                        if wrong == TRIES:
                            raise _changed(self.url, shard, why) from None
                    except StoreError as error:
                        why = str(error)
                        pause = min(2 * pause, _LONGEST_PAUSE)
                    except OSError as error:
                        fix = "Name a disk with more room in TMPDIR, or lower data.cache_gb."
                        raise UserError(f"No shard can be stored in {self.folder}.", why=f"{error}.", fix=fix) from None
                if given_up and given_up():
                    return
                why = self._trouble(why, began)
                # Whoever fetches it touches the lock for each part that comes.
                quiet = time.time() - max(began, os.fstat(lock.fileno()).st_mtime)
                if quiet > self.patience and not given_up:
                    why = f"No byte of it has arrived for {terminal.duration(quiet)}: {why or 'it does not answer'}."
                    fix = "Resume the run once the store is back. data.patience sets how long training waits."
                    raise RunFailedError(f"{self.url}/{shard.name} does not arrive.", why=why, fix=fix)
                if not given_up:
                    self._say(shard, why, began)
                time.sleep(pause)
                is_locked = is_locked or _locked(lock)
            with suppress(OSError):  # it is needed now
                os.utime(file)
        seconds = time.time() - began
        if not given_up and seconds >= QUIET_SECONDS:
            self.waited[f"{self.url}/{shard.name}"] = round(seconds, 1)

    @contextmanager
    def ahead(self) -> Iterator[Callable[[Iterable[Shard]], None]]:
        """Fetch in the background, while the block runs, the shards that it tells of, in their order."""
        wanted: queue.SimpleQueue[Shard | None] = queue.SimpleQueue()
        is_over = threading.Event()

        def work() -> None:
            for shard in iter(wanted.get, None):
                if is_over.is_set():
                    return
                with suppress(Exception):  # who reads it meets the same, and says so
                    self.fetch(shard, is_over.is_set)

        def tell(shards: Iterable[Shard]) -> None:
            for shard in shards:
                wanted.put(shard)

        if not self.is_near:
            for _ in range(AT_ONCE):
                threading.Thread(target=work, name="trainkit-shards", daemon=True).start()
        try:
            yield tell
        except BaseException:  # the loop ends before its data does
            is_over.set()
            raise
        finally:
            for _ in range(AT_ONCE):
                wanted.put(None)

    def _file(self, shard: Shard) -> Path:
        return self.folder / f"{shard.sha256[:40]}.shard"

    def _lock_of(self, name: str) -> Path:
        """The lock of a shard, by its hash or the name of its file, which begins with that."""
        return self.folder / f"{name[:16]}.lock"

    def _download(
        self, shard: Shard, file: Path, lock: BinaryIO, began: float, given_up: Callable[[], bool] | None
    ) -> None:
        for left in self.folder.glob(f".partial-*-{file.name}"):  # by one that was killed: this one holds the lock
            left.unlink(missing_ok=True)
        digest = hashlib.sha256()
        size = 0
        with ExitStack() as files:
            out = files.enter_context(fileio.replacing(file, self.folder))
            fetched: Any = out
            if shard.columns:
                fetched = files.enter_context(tempfile.TemporaryFile(dir=self.folder))
            with fileio.append(self.folder / "room.lock", self.folder) as room:
                fcntl.flock(room, fcntl.LOCK_EX)
                need = shard.kept + (shard.size if shard.columns else 0)
                self._make_room(need)
                out.truncate(need)  # so that it counts from now on
            for block in _store(self.url, os.getpid()).blocks(shard.name, shard.size):
                os.utime(lock.fileno())
                if not given_up:
                    self._say(shard, "", began)
                size += len(block)
                if size > shard.size:
                    break
                digest.update(block)
                fetched.write(block)
                if given_up and given_up():
                    raise StoreError("nobody waits for it")
            if size != shard.size:
                raise WrongContentError(f"It does not have {shard.size} bytes")
            if digest.hexdigest() != shard.sha256:
                raise WrongContentError("Its content differs")
            if shard.columns:
                _unpack(fetched, shard, out)

    def _make_room(self, size: int) -> None:
        """Remove what was needed longest ago, until ``size`` more bytes are within the limit.

        Raises StoreError where shards that are on their way leave no room: they are, in a moment.
        """
        found = {}
        # Looked at twice: one that gets its final name before its size is asked for is there under that.
        for name in chain.from_iterable(os.listdir(self.folder) for _ in range(2)):
            with suppress(FileNotFoundError):
                if name.endswith(".shard"):
                    found[name.rpartition("-")[2]] = ((self.folder / name).stat(), name)
        total = sum(about.st_size for about, _ in found.values())
        for about, name in sorted(found.values(), key=lambda item: item[0].st_mtime):
            if total + size > self.most and (not name.startswith(".") or self._is_abandoned(name)):
                with suppress(FileNotFoundError):  # it is whole by now, and takes its room under its final name
                    (self.folder / name).unlink()
                    total -= about.st_size
        if total + size > self.most:
            raise StoreError("there is no space on this node's disk beside the shards that are being fetched")

    def _is_abandoned(self, partial: str) -> bool:
        """Tell whether the process that fetched it was killed: nobody has its lock."""
        with fileio.append(self._lock_of(partial.rpartition("-")[2]), self.folder) as lock:
            return _locked(lock)

    def _trouble(self, why: str, began: float) -> str:
        """Reason why a shard does not come: this process's own, or what another one of the node has noted since."""
        told = self.folder / "trouble.txt"
        with suppress(OSError):
            if why:
                fileio.write(told, why, self.folder)
            elif told.stat().st_mtime >= began:
                return terminal.one_line(fileio.read_start(told, 500))
        return why

    def _say(self, shard: Shard, why: str, began: float) -> None:
        """Say that a shard is waited for: one process of the rank, once a minute. An attempt says it anew, whatever
        the one before it has said."""
        said = self.folder / f"said-{self._rank}.txt"
        now = time.time()
        with suppress(OSError, TrainkitError):  # a full disk, a newer attempt
            due = began + QUIET_SECONDS
            if said.exists() and said.stat().st_mtime >= began:
                due = max(due, said.stat().st_mtime + AGAIN_SECONDS)
            if now >= due:
                fileio.write(said, "", self.folder)
                where = f"{self.url}/{shard.name}"
                lasts = terminal.duration(now - began)
                terminal.warn(": ".join(filter(None, [f"Training waits for {where} since {lasts}", why])) + ".")
                self.tell(file=where, seconds=round(now - began, 1), why=why)


def _unpack(parquet_file: BinaryIO, shard: Shard, out: BinaryIO) -> None:
    """Write the images of a shard of parquet, one after another. Raises WrongContentError."""
    kept = 0
    with parquet.opened(parquet_file, shard.name, *(shard.columns or ())) as (_, rows):
        for image, _ in rows:
            kept += len(image)
            if kept > shard.kept:
                break
            out.write(image)
    if kept != shard.kept:
        raise WrongContentError(f"Its images do not have {shard.kept} bytes")
    out.truncate(shard.kept)


def _changed(url: str, shard: Shard, why: str) -> UserError:
    again = terminal.command("prepare", "stream", f"data.url={url}", "--root", "FOLDER")
    fix = f"Restore the old file, or index the new one under another data.root: {again}"
    return UserError(f"{url}/{shard.name} differs from the indexed file.", why=f"{why}.", fix=fix, key="data.url")


def _locked(file: BinaryIO) -> bool:
    """Take a lock; False where another process has it."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
