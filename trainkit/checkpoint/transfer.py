"""Keeps a run's copy elsewhere: sends `latest` and `best` behind the training, and brings runs and checkpoints back.

What comes back is verified and bounded, and nothing of it is run.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from trainkit import fileio, terminal
from trainkit.checkpoint import format, remote
from trainkit.checkpoint.format import BrokenCheckpointError, Record
from trainkit.checkpoint.remote import AbsentError, Pointers, Store, StoreError
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.run.events import Attempt, Writer, read_events
from trainkit.run.folder import CLAIM, RunDir, make_private
from trainkit.run.lease import Holder, lease_on
from trainkit.run.snapshot import are_of_code, read_code

_TRIES = 6
_LONGEST_PAUSE = 60.0
_LONGEST_CODE = 256 << 20
_MOST_FILES = 20_000
_FETCH_STAGE, _SEND_STAGE = ".fetching", ".sending"


def fetch_run(url: str, root: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> RunDir:
    """Make the folder of the run whose copy is at ``url``, in ``root``; or bring the one that is there up to date.

    Args:
        wanted: which files of checkpoints.

    Raises:
        UserError: there is no run, none of its checkpoints is whole, or another run has its name here.
    """
    store = Store(url, tries=_TRIES)
    try:
        place = remote.small_object(store, remote.PLACE)
        if "id" not in place:
            raise UserError(
                f"There is no run in {url}.",
                why=f"It has no {remote.PLACE}, which a run with checkpoint.remote writes first.",
                fix="Give checkpoint.remote and the run's name: s3://bucket/prefix/ddp-0001.",
            )
        path = (root / PurePosixPath(store.url).name).absolute()
        if path.exists():
            own = remote.own_place(RunDir(path))
            if own is None or own["id"] != place["id"]:
                raise UserError(
                    f"{path} is another run.",
                    why=f"The one in {url} has the same name.",
                    fix="Rename that folder, or set TRAINKIT_RUNS to another.",
                )
            bring_back(store, RunDir(path))
            return RunDir(path)
        return _made(store, path, wanted)
    except StoreError as error:
        raise remote.unreachable(url, error) from None


def bring_back(store: Store, run: RunDir, *, wanted: Callable[[str], bool] = lambda name: True) -> list[int]:
    """Fetch what ``latest`` and ``best`` name there, unless it is here or there is newer here. Their steps.

    Raises:
        StoreError: the place does not answer.
        UserError: there are checkpoints, and none of them is whole.
    """
    folder = run.checkpoints
    here = format.pointed(folder, "latest")
    there = Pointers.read(store)
    if there.latest is None or (here is not None and here >= there.latest):
        return []
    fetched, why = [], ""
    for step in there.steps:
        if format.path_of(folder, step).exists():
            fetched.append(step)
            continue
        try:
            _fetch_step(store, folder, step, wanted)
            fetched.append(step)
        except (BrokenCheckpointError, AbsentError) as fault:
            why = f"{fault}."
            print(f"The checkpoint of step {step} in {store.url} is broken: {fault}.", file=sys.stderr, flush=True)
    if not fetched:
        raise UserError(f"No checkpoint in {store.url} is whole.", why=why, fix="Train again: `python -m jobs.submit`.")
    format.point(folder, "latest", there.latest if there.latest in fetched else fetched[0])
    if there.best in fetched:
        format.point(folder, "best", there.best)
    return fetched


def _made(store: Store, path: Path, wanted: Callable[[str], bool]) -> RunDir:
    partial = path.with_name(f".{path.name}.fetched")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    make_private(partial)
    try:
        for name in (*remote.RUN_FILES, *remote.RECORDS, remote.PLACE):
            try:
                fileio.write(partial / name, store.read(name, limit=remote.LONGEST_TEXT), partial)
            except AbsentError:
                if name == "config.yaml":
                    raise
        with suppress(AbsentError):  # a run that was started without a snapshot
            _unpack(store.read(remote.CODE, limit=_LONGEST_CODE), partial)
        run = RunDir(partial)
        fileio.make_folder(run.logs, partial)
        for event in read_events(run, "started"):  # their numbers are taken
            if type(event.get("attempt")) is int:
                fileio.make_folder(run.attempt_logs(event["attempt"]), partial)
                fileio.write(CLAIM.at(run.attempt_logs(event["attempt"]), 0), "", partial)
        bring_back(store, run, wanted=wanted)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return RunDir(path)


def _fetch_step(store: Store, folder: Path, step: int, wanted: Callable[[str], bool]) -> None:
    record = remote.record_of(store, step)
    stage = folder / _FETCH_STAGE
    fileio.make_folder(folder, folder.parent)
    shutil.rmtree(stage, ignore_errors=True)
    fileio.make_folder(stage, folder.parent)
    try:
        for name, facts in record.files.items():
            if not wanted(name):
                continue
            digest, size = hashlib.sha256(), 0
            with fileio.replacing(stage / name, folder.parent) as out:
                for block in store.blocks(f"{remote.folder_of(step)}/{name}", facts.bytes):
                    size += out.write(block)
                    digest.update(block)
            format.require_same(name, facts, size, digest.hexdigest())
        fileio.write(stage / "state.json", record.to_json(), folder.parent)
        stage.rename(format.path_of(folder, step))
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _unpack(packed: bytes, into: Path) -> None:
    """Files below ``code/``, and of these only what a snapshot holds (`are_of_code`)."""
    try:
        code = _code_in(packed)
    except fileio.BROKEN_TAR as error:
        raise StoreError(f"{remote.CODE} is not what a run has written ({terminal.one_line(error)})") from None
    for name, content in code.items():
        fileio.make_folder((into / name).parent, into)
        fileio.write(into / name, content, into)


def _code_in(packed: bytes) -> dict[str, bytes]:
    # Unpacked before it is read as a tar file: a header of that may itself be as long as it likes.
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as compressed:
        content = compressed.read(_LONGEST_CODE + 1)
    left, found = _LONGEST_CODE, dict[str, bytes]()
    if len(content) > left:
        raise tarfile.TarError("it is too long")
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:", tarinfo=fileio.TarMember) as archive:
        members = [item for item in archive if item.isfile()]  # no folders, links and devices
        for item in members:
            left -= item.size  # of a sparse one more than its archive holds
            data = archive.extractfile(item) if left >= 0 and item.name.startswith("code/") else None
            if data is None:
                raise tarfile.TarError(f"{item.name!r:.80}")
            found[item.name] = data.read()
    if not are_of_code([item.name.removeprefix("code/") for item in members]) or len(members) > _MOST_FILES:
        raise tarfile.TarError("its names are no code's")
    return found


class Uploads:
    """The thread of one run, on rank 0, that sends one file at a time, the newest checkpoint first.

    What cannot be sent is tried again, with pauses of 1, 2, 4, ... 60 seconds, as long as the run goes on; events say
    when that begins and when it ends. Training never waits for it.

    Args:
        pause: seconds before the second try.
    """

    def __init__(self, store: Store, writer: Writer, *, pause: float = 1.0) -> None:
        self._store, self._writer, self._pause = store, writer, pause
        self._folder = writer.run.checkpoints
        self._wake, self._over = threading.Event(), threading.Event()
        self._idle = threading.Condition()
        self._asked = self._done = 0
        self._described = False
        self._failing_since: float | None = None
        self.unreadable = ""
        """What of the run itself could not be read, and so was not sent."""
        self._sent: dict[int, Record] = {}
        self._thread = threading.Thread(target=self._work, name="trainkit-uploads", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """There may be something new in the folder."""
        with self._idle:
            self._asked += 1
        self._wake.set()

    def wait(self, seconds: float) -> bool:
        """Until everything that was to be sent by now is there, at most so long. Is it?"""
        with self._idle:
            asked = self._asked
            self._idle.wait_for(lambda: self._done >= asked or not self._thread.is_alive(), seconds)
            return self._done >= asked

    def finish(self, seconds: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all is there; end, and say what is not, when nothing has come through for so long. Is it there?

        Args:
            give_up: asked every second; True ends the waiting.
        """
        if seconds:
            self.look()  # the last records, and the summary
        deadline = time.monotonic() + seconds
        while not self.wait(1.0) and self._thread.is_alive() and not give_up():
            if self._failing_since is None:  # it takes its time, but it goes
                deadline = time.monotonic() + seconds
            elif time.monotonic() > deadline:
                break
        self._over.set()
        self._wake.set()
        is_there = self._done >= self._asked and not self.unreadable
        if not is_there:
            self._say("not_uploaded")
        return is_there

    def _work(self) -> None:
        tries = 0
        while not self._over.is_set():
            self._wake.wait()
            self._wake.clear()
            with self._idle:
                asked = self._asked
            while not self._over.is_set():
                try:
                    self._bring_up_to_date()
                except StoreError as error:
                    if self._over.is_set():
                        return
                    tries += 1
                    self._described = False  # who knows what is left there
                    self._sent.clear()
                    if tries == 1:
                        self._failing_since = time.monotonic()
                        self._say("upload_failed", why=str(error))
                    self._over.wait(min(self._pause * 2 ** (tries - 1), _LONGEST_PAUSE))
                    continue
                except TrainkitError:  # another attempt writes the run by now
                    return
                except OSError as error:  # the run folder is gone, its disk full, or there is a link in it
                    self.unreadable = f"{error.strerror}: {error.filename}"
                    self._say("upload_failed", why=self.unreadable)
                else:
                    self.unreadable = ""
                break
            else:
                return
            if tries:
                assert self._failing_since is not None
                self._say("upload_recovered", tries=tries, seconds=round(time.monotonic() - self._failing_since, 1))
                tries, self._failing_since = 0, None
            with self._idle:
                self._done = asked
                self._idle.notify_all()

    def _bring_up_to_date(self) -> None:
        """Send what is not there yet, then point at it, then remove what nothing points at."""
        if not self._described:
            self._describe()
        there = Pointers.read(self._store)
        # One of each, then the pointers: where saves come faster than they go up, there is always a newer one.
        up = Pointers(self._sent_of("latest", there.latest), self._sent_of("best", there.best))
        for name in remote.RECORDS:
            self._send_copy(self._writer.run.path / name, name)
        if up != there:
            self._writer.check()
            up.write(self._store)
        self._prune(up)

    def _sent_of(self, name: str, there: int | None) -> int | None:
        """The step that ``name`` names here, once it has been sent; else what it names there."""
        self._writer.check()
        step = format.pointed(self._folder, name)
        if step is None:
            return there
        try:
            record = format.described(self._folder, step)
        except BrokenCheckpointError:  # deleted meanwhile: there is a newer one
            return there
        if self._sent.get(step) != record:
            self._send(step, record)
        return step

    def _send(self, step: int, record: Record) -> None:
        began, folder, known = time.monotonic(), remote.folder_of(step), None
        with suppress(AbsentError, BrokenCheckpointError):
            known = remote.record_of(self._store, step)
        if known == record:  # sent by the attempt before this one
            self._sent[step] = record
            return
        with self._held(step, record) as held:
            if known is None or known.files != record.files:
                self._store.remove(f"{folder}/state.json")  # that of other weights of this step, before a rollback
                for name in record.files:
                    if self._over.is_set():
                        raise StoreError("the run is over")
                    self._store.put(held / name, f"{folder}/{name}")
            self._writer.check()
            self._store.write(record.to_json().encode(), f"{folder}/state.json")
        self._sent[step] = record
        size = sum(facts.bytes for facts in record.files.values())
        self._say("uploaded", step=step, bytes=size, seconds=round(time.monotonic() - began, 3))

    @contextmanager
    def _held(self, step: int, record: Record) -> Iterator[Path]:
        """The checkpoint's files by other names of theirs, so that they stay when it is deleted meanwhile."""
        here, stage = format.path_of(self._folder, step), self._folder / _SEND_STAGE
        shutil.rmtree(stage, ignore_errors=True)  # left by a process that was killed
        try:
            fileio.make_folder(stage, self._writer.run.path)
            for name in record.files:
                os.link(here / name, stage / name)
        except OSError:  # a file system without links: it will be tried again, should they go away
            shutil.rmtree(stage, ignore_errors=True)
            stage = here
        try:
            for name in record.files:
                if (stage / name).is_symlink():
                    fileio.open_regular(here / name).close()  # raises, and names the file that the user knows
            yield stage
        except FileNotFoundError as gone:
            raise StoreError(f"{gone.filename} was deleted meanwhile") from None
        finally:
            if stage != here:
                shutil.rmtree(stage, ignore_errors=True)

    def _describe(self) -> None:
        """What makes a run folder of it again."""
        run = self._writer.run
        if not remote.small_object(self._store, remote.PLACE):
            self._send_copy(run.path / remote.PLACE, remote.PLACE)
        for name in remote.RUN_FILES:
            self._send_copy(run.path / name, name)
        if code := read_code(run):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:gz") as archive:
                for name, content in code.items():
                    item = tarfile.TarInfo(f"code/{name}")
                    item.size = len(content)
                    archive.addfile(item, io.BytesIO(content))
            self._store.write(packed.getvalue(), remote.CODE)
        self._described = True

    def _send_copy(self, file: Path, name: str) -> None:
        """As it is now: it may grow while it is sent."""
        with suppress(FileNotFoundError):
            self._store.write(fileio.read_bytes(file, remote.LONGEST_TEXT), name)

    def _prune(self, up: Pointers) -> None:
        """What cannot be removed now stays for the next time; it harms nobody."""
        with suppress(StoreError):
            for step in [format.step_of(name) for name in self._store.names("checkpoints")]:
                if step is not None and step not in up.steps:
                    self._writer.check()
                    remote.remove_step(self._store, step)
                    self._sent.pop(step, None)

    def _say(self, kind: str, **facts: object) -> None:
        with suppress(TrainkitError, OSError):
            self._writer.attempt.remark(kind, url=self._store.url, **facts)  # type: ignore[arg-type]
        told = {
            "upload_failed": f"Not sent to {self._store.url} for now: {facts.get('why')}. Training goes on.",
            "not_uploaded": f"The newest checkpoint is not in {self._store.url} yet. It goes there by: "
            f"{terminal.command('resume', self._writer.run.path)}",
        }
        if kind in told:
            print(told[kind], file=sys.stderr, flush=True)


def send_rest(run: RunDir, url: str, *, seconds: float = 60.0) -> str:
    """Send what is not in ``url`` yet of a run that nobody writes. Where it is then.

    Args:
        seconds: how long to go on when nothing comes through.

    Raises:
        UserError: the place cannot be used, or somebody writes the run.
        RunFailedError: not all of it is there.
    """
    with lease_on(run, Holder.me()) as lease:
        store = remote.claim(url, run)
        writer = Writer(Attempt(run, max(run.attempts(), default=0), lease.check), lease.check)
        uploads = Uploads(store, writer)
        if not uploads.finish(seconds):
            why, fix = "It did not answer, or broke off, for a minute.", "Give the same command again once it is back."
            if uploads.unreadable:
                why, fix = f"{uploads.unreadable}.", "Put the file itself there, and give the same command again."
            raise RunFailedError(f"Not all of {run.name} is in {store.url}.", why=why, fix=fix)
    return store.url


def kept_elsewhere(url: str | None, writer: Writer, dist: Distributed) -> Uploads | None:
    """Begin to keep a run's copy in ``url``, on rank 0; None elsewhere, and without a URL. Every rank calls it.

    What is there of this run and not in its folder, whose disk may have been lost, is fetched first.

    Raises:
        UserError: on every rank: the place cannot be used, or another run is there.
    """

    def kept() -> Uploads | None:
        if not dist.is_main or url is None:
            return None
        try:
            store = remote.claim(url, writer.run)
            if steps := bring_back(Store(store.url, tries=_TRIES), writer.run):
                print(f"Fetched from {store.url}: step {', '.join(map(str, steps))}.", flush=True)
        except StoreError as problem:
            raise remote.unreachable(url, problem) from None
        uploads = Uploads(store, writer)
        uploads.look()  # what the attempt before this one had no time for
        return uploads

    return dist.together(kept)
