"""Send a run's copy behind the training."""

import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainkit.checkpoint import format, remote
from trainkit.checkpoint.format import BrokenCheckpointError, CheckpointManifest
from trainkit.checkpoint.remote import fetch_checkpoints, stage_at
from trainkit.common import fileio, terminal
from trainkit.common.errors import RunFailedError, TrainkitError
from trainkit.common.object_store import AbsentError, Store, StoreError
from trainkit.distributed.process_group import Distributed
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import Holder, lease_on
from trainkit.run.snapshot import read_code

_LONGEST_PAUSE = 60.0


class Uploads:
    """The thread of one run, on rank 0, that sends one file at a time, the newest checkpoint first.

    What cannot be sent is tried again, with pauses of 1, 2, 4, ... 60 seconds, as long as the run goes on; events say
    when that begins and when it ends. Training never waits for it.

    Args:
        pause: seconds before the second try.
    """

    def __init__(self, store: Store, writer: Attempt, *, pause: float = 1.0) -> None:
        self._store = store
        self._writer = writer
        self._pause = pause
        self._folder = writer.run.checkpoints
        self._changed = threading.Condition()
        """Guards, and tells of, the three below."""
        self._asked = 0
        self._done = 0
        self._over = False
        self._is_described = False
        self._tries = 0
        self._sent: dict[int, CheckpointManifest] = {}
        self.unreadable = ""
        """File of the run itself that could not be read, and so was not sent, and why."""
        self._thread = threading.Thread(target=self._work, name="trainkit-uploads", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look for something new in the folder."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until everything queued so far is sent, at most this long. Returns whether it is."""
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._done >= asked or not self._thread.is_alive(), seconds)
            return self._done >= asked

    def finish(self, seconds: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all is sent; give up, and say what is missing, when nothing moves for this long.

        Returns whether all is sent.

        Args:
            give_up: asked every second; True ends the waiting.
        """
        if seconds:
            self.look()  # the last records, and the summary
        deadline = time.monotonic() + seconds
        while not self.wait(1.0) and self._thread.is_alive() and not give_up():
            if not self._tries:  # it takes its time, but it goes
                deadline = time.monotonic() + seconds
            elif time.monotonic() > deadline:
                break
        with self._changed:
            self._over = True
            self._changed.notify_all()
        is_there = self._done >= self._asked and not self.unreadable
        if not is_there:
            self._say("not_uploaded")
        return is_there

    def _work(self) -> None:
        began = 0.0
        pause = self._pause
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._asked > self._done)
                asked = self._asked
            if self._over:
                return
            self.unreadable = ""
            try:
                self._bring_up_to_date()
            except StoreError as error:
                self._is_described = False  # who knows what is left there
                self._sent.clear()
                if not self._tries and not self._over:
                    began = time.monotonic()
                    self._say("upload_failed", why=str(error))
                self._tries += 1
                with self._changed:
                    self._changed.wait_for(lambda: self._over, pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            except TrainkitError:  # another attempt writes the run by now
                return
            except OSError as error:  # the run folder is gone, its disk full, or there is a link in it
                self.unreadable = f"{error.strerror}: {error.filename}"
                self._say("upload_failed", why=self.unreadable)
            if self._tries:
                self._say("upload_recovered", tries=self._tries, seconds=round(time.monotonic() - began, 1))
            self._tries = 0
            pause = self._pause
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _bring_up_to_date(self) -> None:
        """Send what is not there yet, then point at it, then remove what nothing points at."""
        if not self._is_described:
            self._describe()
        there = remote.pointers(self._store)
        # One of each, then the pointers: where saves come faster than they go up, there is always a newer one.
        up = dict(there)
        for name in ("latest", "best"):
            step = self._sent_of(name)
            if step is not None:
                up[name] = step
        for name in remote.RECORDS:
            self._send_copy(name)
        if up != there:
            self._writer.may_write()
            pointers = {"latest": up.get("latest"), "best": up.get("best")}
            self._store.write(json.dumps(pointers).encode(), remote.POINTERS)
        with suppress(StoreError):  # what cannot be removed now stays for the next time; it harms nobody
            for name in self._store.names("checkpoints"):
                old = format.step_of(name)
                if old is not None and old not in up.values():
                    self._writer.may_write()
                    remote.remove_step(self._store, old)
                    self._sent.pop(old, None)

    def _sent_of(self, name: str) -> int | None:
        """The step that ``name`` names here, once it has been sent; None if there is none to send."""
        self._writer.may_write()
        step = format.pointed(self._folder, name)
        if step is None:
            return None
        try:
            record = format.manifest_of(self._folder, step)
        except BrokenCheckpointError:  # deleted meanwhile: there is a newer one
            return None
        if self._sent.get(step) != record:
            self._send(record)
            self._sent[step] = record
        return step

    def _send(self, record: CheckpointManifest) -> None:
        began = time.monotonic()
        folder = remote.folder_of(record.step)
        known: CheckpointManifest | None = None
        with suppress(AbsentError, BrokenCheckpointError):
            known = remote.record_of(self._store, record.step)
        if known == record:  # sent by the attempt before this one
            return
        with self._held(record) as held:
            if known is None or known.files != record.files:
                self._store.remove(f"{folder}/state.json")  # that of other weights of this step, before a rollback
                for name in record.files:
                    if self._over:
                        raise StoreError("the run is over")
                    self._store.put(held / name, f"{folder}/{name}")
            self._writer.may_write()
            self._store.write(record.to_json().encode(), f"{folder}/state.json")
        size = sum(facts.bytes for facts in record.files.values())
        self._say("uploaded", step=record.step, bytes=size, seconds=round(time.monotonic() - began, 3))

    @contextmanager
    def _held(self, record: CheckpointManifest) -> Iterator[Path]:
        """The checkpoint's files by other names of theirs, so that they stay when it is deleted meanwhile."""
        here = format.path_of(self._folder, record.step)
        with stage_at(self._folder / ".sending") as stage:
            held = stage
            try:
                fileio.make_folder(stage, self._writer.run.path)
                for name in record.files:
                    fileio.open_regular(here / name).close()  # one that is a link has no other name
                    os.link(here / name, stage / name)
            except OSError:  # a full disk, or a file system without links: they are sent from where they are
                held = here
            yield held

    def _describe(self) -> None:
        """Send what makes a run folder of it again."""
        if not self._store.read_object(remote.PLACE):
            self._send_copy(remote.PLACE)
        for name in remote.RUN_FILES:
            self._send_copy(name)
        code = read_code(self._writer.run)
        if code:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:gz") as archive:
                for name, content in code.items():
                    item = tarfile.TarInfo(f"code/{name}")
                    item.size = len(content)
                    archive.addfile(item, io.BytesIO(content))
            self._store.write(packed.getvalue(), remote.CODE)
        self._is_described = True

    def _send_copy(self, name: str) -> None:
        """Send a file as it is now: it may grow meanwhile."""
        with suppress(FileNotFoundError):
            self._store.write(fileio.read_bytes(self._writer.run.path / name, remote.LONGEST_RECORD), name)

    def _say(self, kind: str, **facts: object) -> None:
        with suppress(TrainkitError, OSError):
            self._writer.remark(kind, url=self._store.url, **facts)  # type: ignore[arg-type]
        again = terminal.command("resume", self._writer.run.path)
        said = {
            "upload_failed": f"Not sent to {self._store.url} for now: {facts.get('why')}. Training goes on.",
            "not_uploaded": f"The newest checkpoint is not in {self._store.url} yet. It goes there by: {again}",
        }
        if kind in said:
            terminal.warn(said[kind])


def send_rest(run: RunDir, url: str, *, seconds: float = 60.0) -> str:
    """Send what is not in ``url`` yet of a run that nobody writes. Returns the place of its copy.

    Args:
        seconds: how long to go on when nothing comes through.

    Raises:
        UserError: the place cannot be used, or somebody writes the run.
        RunFailedError: not all of it is there.
    """
    with lease_on(run, Holder.me()) as lease:
        store = remote.claim(url, run)
        writer = Attempt(run, max(run.attempts(), default=0), lease.check)
        uploads = Uploads(store, writer)
        if not uploads.finish(seconds):
            why = "It did not answer for a minute, or the connection broke."
            fix = "Give the same command again once it is back."
            if uploads.unreadable:
                why = f"{uploads.unreadable}."
                fix = "Put the file itself there, and give the same command again."
            raise RunFailedError(f"Not all of {run.name} is in {store.url}.", why=why, fix=fix)
    return store.url


def open_remote(url: str | None, writer: Attempt, dist: Distributed) -> Uploads | None:
    """Begin to keep a run's copy in ``url``, on rank 0; None elsewhere, and without a URL. Every rank calls it.

    What is there of this run and not in its folder, whose disk may have been lost, is fetched first.

    Raises:
        UserError: on every rank: the place cannot be used, or another run is there.
    """

    def opened() -> Uploads | None:
        if not dist.is_main or url is None:
            return None
        store = remote.claim(url, writer.run)
        try:
            with store.patiently():
                steps = fetch_checkpoints(store, writer.run)
        except StoreError as problem:
            raise remote.unusable(url, problem) from None
        if steps:
            terminal.say(f"Fetched from {store.url}: step {', '.join(map(str, steps))}.")
        uploads = Uploads(store, writer)
        uploads.look()  # what the attempt before this one had no time for
        return uploads

    return dist.together(opened)
