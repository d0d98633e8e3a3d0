"""A run's copy in a bucket or another folder (`checkpoint.remote`): sent behind the training, and fetched back.

    s3://bucket/prefix/RUN/remote.json                  whose it is: a number that the run's folder has, too
                           config.yaml manifest.json plan.json code.tar.gz
                           metrics.jsonl task.json evaluations.jsonl events.jsonl summary.json confusion.json
                           mistakes-*.json labels.jsonl
                           checkpoints/step-00001000/   as in the run folder; state.json is sent last
                           pointers.json                what `latest` and `best` name, both whole

A checkpoint whose ``state.json`` is there is complete: it is the last to be sent and the first to be removed. What
comes back is bounded, compared with the hashes in it, and nothing of it is run.
"""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import IO, cast

from trainkit import fileio, terminal
from trainkit.checkpoint import format
from trainkit.checkpoint.format import BrokenCheckpointError, Record
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.run.events import Attempt, Holder, attempts_that, lease_on
from trainkit.run.folder import CLAIM, REMOTE, RunDir, make_private
from trainkit.run.snapshot import LARGEST_CODE, are_of_code, contents, read_code, write_tree
from trainkit.store import LONGEST_OBJECT, AbsentError, Store, StoreError

PLACE, POINTERS, CODE = REMOTE.name, "pointers.json", "code.tar.gz"
RUN_FILES = ("config.yaml", "manifest.json", "plan.json")
RECORDS = (
    *("metrics.jsonl", "task.json", "evaluations.jsonl", "events.jsonl", "summary.json", "confusion.json"),
    *("mistakes-val.json", "mistakes-test.json", "labels.jsonl"),
)
LONGEST_RECORD, _LONGEST_CODE = 1 << 30, 2 * LARGEST_CODE
_LONGEST_PAUSE = 60.0


def pointers(store: Store) -> dict[str, int]:
    """Steps that ``latest`` and ``best`` name in a run's copy, without what is absent or unreadable."""
    told = store.read_object(POINTERS)
    named = {name: told.get(name) for name in ("latest", "best")}
    return {name: step for name, step in named.items() if type(step) is int and 0 <= step < 10**15}


def folder_of(step: int) -> str:
    """Name of a checkpoint's folder in the copy."""
    return f"checkpoints/{format.path_of(Path(), step).name}"


def remove_step(store: Store, step: int) -> None:
    """Remove a checkpoint, which is incomplete from the first moment on."""
    folder = folder_of(step)
    store.remove(f"{folder}/state.json")
    for name in store.names(folder):
        store.remove(f"{folder}/{name}")
    store.remove_folder(folder)


def record_of(store: Store, step: int) -> Record:
    """The record of the copy's checkpoint of ``step``.

    Raises:
        StoreError: there is none, or the place does not answer.
        BrokenCheckpointError: it is no whole one.
    """
    return format.parse(store.read(f"{folder_of(step)}/state.json", limit=format.LONGEST), step)


def claim(remote: str, run: RunDir) -> Store:
    """The place of a run below ``remote``, which is found to be this run's, writable and readable.

    Raises:
        UserError: it cannot be reached, written or read; or another run is there.
    """
    own, remote = _own_place(run), remote.rstrip("/")
    in_sweep = (run.path.parent / "sweep.json").is_file()
    url = f"{remote}/{run.path.parent.name}/{run.path.name}" if in_sweep else f"{remote}/{run.path.name}"
    if own and own["url"].startswith(f"{remote}/"):
        url = own["url"]
    number = own["id"] if own else uuid.uuid4().hex
    content = json.dumps({"id": number, "url": url}).encode()
    store = Store(url)
    try:
        with store.patiently() if own else nullcontext():  # a new run learns at once that its place is wrong
            there = store.read_object(PLACE)
            if there and there.get("id") != number:
                what = f"There is another run in {url} already."
                why = "It was not made by this run folder, and would be lost."
                fix = f"Go on with it: `{terminal.command('resume', url)}`; or give another checkpoint.remote."
                raise UserError(what, why=why, fix=fix, key="checkpoint.remote")
            store.write(content, PLACE)
            if store.read(PLACE, limit=LONGEST_OBJECT) != content:
                raise StoreError("what was written there does not come back")
    except StoreError as error:
        raise _unusable(url, error) from None
    if own is None or own["url"] != url:
        fileio.write(run.path / PLACE, content, run.path)
    return store


def _unusable(url: str, error: StoreError) -> UserError:
    return UserError(
        f"{url} cannot be used.",
        why=f"{error}.",
        fix="Check the bucket's name, its region, and the credentials in the environment (AWS_PROFILE or "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; GOOGLE_APPLICATION_CREDENTIALS).",
        key="checkpoint.remote",
    )


def _own_place(run: RunDir) -> dict[str, str] | None:
    """Number and URL of the run's copy, as its folder says; None without such a copy."""
    told = fileio.read_object(run.path / PLACE)
    has_id = re.fullmatch("[0-9a-f]{32}", str(told.get("id")))
    return told if has_id and isinstance(told.get("url"), str) else None


def fetch_run(url: str, root: Path, *, weights_only: bool = False) -> RunDir:
    """Make the folder of the run whose copy is at ``url``, in ``root``; or bring the one that is there up to date.

    Args:
        weights_only: leave out the states of optimizers.

    Raises:
        UserError: there is no run, none of its checkpoints is whole, or another run has its name here.
    """
    store = Store(url)
    path = (root / PurePosixPath(store.url).name).absolute()
    try:
        with store.patiently():
            place = store.read_object(PLACE)
            if "id" not in place:
                why = f"It has no {PLACE}, which a run with checkpoint.remote writes first."
                fix = "Give checkpoint.remote and the run's name: s3://bucket/prefix/ddp-0001."
                raise UserError(f"There is no run in {url}.", why=why, fix=fix)
            if not path.exists():
                _fetch_folder(store, path, weights_only)
            elif (own := _own_place(RunDir(path))) is None or own["id"] != place["id"]:
                why = f"The one in {url} has the same name."
                fix = "Rename that folder, or set TRAINKIT_RUNS to another."
                raise UserError(f"{path} is another run.", why=why, fix=fix)
            else:
                fetch_checkpoints(store, RunDir(path))
    except StoreError as error:
        raise _unusable(url, error) from None
    return RunDir(path)


def _fetch_folder(store: Store, path: Path, weights_only: bool) -> None:
    with stage_at(path.with_name(f".{path.name}.fetched")) as stage:
        make_private(stage)
        run = RunDir(stage)
        for name in (*RUN_FILES, *RECORDS, PLACE):
            with suppress(AbsentError) if name != "config.yaml" else nullcontext():
                fileio.write(stage / name, store.read(name, limit=LONGEST_RECORD), stage)
        with suppress(AbsentError):  # a run that was started without a snapshot
            unpack_code(store.read(CODE, limit=_LONGEST_CODE), stage)
        take_numbers(run)
        fetch_checkpoints(store, run, weights_only=weights_only)
        stage.rename(path)


def take_numbers(run: RunDir) -> None:
    """Make the log folders of the attempts that a run's record tells of: their numbers are taken."""
    fileio.make_folder(run.logs, run.path)
    for number in attempts_that(run, "started"):
        fileio.make_folder(run.attempt_logs(number), run.path)
        fileio.write(CLAIM.at(run.attempt_logs(number), 0), "", run.path)


def fetch_checkpoints(store: Store, run: RunDir, *, weights_only: bool = False) -> list[int]:
    """Fetch what ``latest`` and ``best`` name there, unless it is here or there is newer here. Their steps.

    Raises:
        StoreError: the place does not answer.
        UserError: there are checkpoints, and none of them is whole.
    """
    folder, there = run.checkpoints, pointers(store)
    here = format.pointed(folder, "latest")
    if "latest" not in there or (here is not None and here >= there["latest"]):
        return []
    fetched, why = [], ""
    for step in dict.fromkeys(there.values()):
        try:
            if not format.path_of(folder, step).exists():
                _fetch_step(store, folder, step, weights_only)
            fetched.append(step)
        except (BrokenCheckpointError, AbsentError) as fault:
            why = f"{fault}."
            print(f"The checkpoint of step {step} in {store.url} is broken: {fault}.", file=sys.stderr, flush=True)
    if not fetched:
        raise UserError(f"No checkpoint in {store.url} is whole.", why=why, fix="Train again: `python -m jobs.submit`.")
    format.point(folder, "latest", there["latest"] if there["latest"] in fetched else fetched[0])
    if there.get("best") in fetched:
        format.point(folder, "best", there["best"])
    return fetched


def _fetch_step(store: Store, folder: Path, step: int, weights_only: bool) -> None:
    record = record_of(store, step)
    with stage_at(folder / ".fetching") as stage:
        fileio.make_folder(stage, folder.parent)
        for name, facts in record.files.items():
            if weights_only and name.startswith("optimizer"):
                continue
            digest, size = hashlib.sha256(), 0
            with fileio.replacing(stage / name, folder.parent) as out:
                for block in store.blocks(f"{folder_of(step)}/{name}", facts.bytes):
                    size += out.write(block)
                    digest.update(block)
            format.require_same(name, facts, size, digest.hexdigest())
        fileio.write(stage / "state.json", record.to_json(), folder.parent)
        stage.rename(format.path_of(folder, step))


@contextmanager
def stage_at(folder: Path) -> Iterator[Path]:
    """The place of a folder for the block to make and fill; what the block or a killed process has left is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpack_code(packed: bytes, into: Path) -> None:
    """Write the files below ``code/`` of an archive, if these are all it has, and what a snapshot holds.

    Raises StoreError for anything else.
    """
    if (content := contents(_code_in(packed))) is None:
        raise StoreError(f"{CODE} is not what a run has written")
    write_tree(content, into, into)


def _code_in(packed: bytes) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of an archive. Raises ValueError, or what tarfile raises, where it is not one of code."""
    # Unpacked before it is read as a tar file: a header of that may itself be as long as it likes.
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as compressed:
        unpacked = compressed.read(_LONGEST_CODE + 1)
    if len(unpacked) > _LONGEST_CODE:
        raise ValueError
    with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:", tarinfo=fileio.TarMember) as archive:
        items = list(archive)
        are_files = all(item.isfile() and item.name.startswith("code/") for item in items)  # no links, no devices
        if not are_files or not are_of_code([item.name.removeprefix("code/") for item in items]):
            raise ValueError
        for item in items:
            yield item.name, cast(IO[bytes], archive.extractfile(item))


class Uploads:
    """The thread of one run, on rank 0, that sends one file at a time, the newest checkpoint first.

    What cannot be sent is tried again, with pauses of 1, 2, 4, ... 60 seconds, as long as the run goes on; events say
    when that begins and when it ends. Training never waits for it.

    Args:
        pause: seconds before the second try.
    """

    def __init__(self, store: Store, writer: Attempt, *, pause: float = 1.0) -> None:
        self._store, self._writer, self._pause = store, writer, pause
        self._folder = writer.run.checkpoints
        self._changed = threading.Condition()
        """Guards, and tells of, the three below."""
        self._asked = self._done = 0
        self._over = False
        self._is_described, self._tries = False, 0
        self._sent: dict[int, Record] = {}
        self.unreadable = ""
        """What of the run itself could not be read, and so was not sent."""
        self._thread = threading.Thread(target=self._work, name="trainkit-uploads", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """There may be something new in the folder."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until everything queued so far is sent, at most this long. Whether it is."""
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._done >= asked or not self._thread.is_alive(), seconds)
            return self._done >= asked

    def finish(self, seconds: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all is sent; give up, and say what is missing, when nothing moves for this long. Whether all is.

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
        began, pause = 0.0, self._pause
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
            self._tries, pause = 0, self._pause
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _bring_up_to_date(self) -> None:
        """Send what is not there yet, then point at it, then remove what nothing points at."""
        if not self._is_described:
            self._describe()
        there = pointers(self._store)
        # One of each, then the pointers: where saves come faster than they go up, there is always a newer one.
        up = {**there, **{name: step for name in ("latest", "best") if (step := self._sent_of(name)) is not None}}
        for name in RECORDS:
            self._send_copy(name)
        if up != there:
            self._writer.may_write()
            self._store.write(json.dumps({"latest": up.get("latest"), "best": up.get("best")}).encode(), POINTERS)
        with suppress(StoreError):  # what cannot be removed now stays for the next time; it harms nobody
            for name in self._store.names("checkpoints"):
                if (old := format.step_of(name)) is not None and old not in up.values():
                    self._writer.may_write()
                    remove_step(self._store, old)
                    self._sent.pop(old, None)

    def _sent_of(self, name: str) -> int | None:
        """The step that ``name`` names here, once it has been sent; None if there is none to send."""
        self._writer.may_write()
        if (step := format.pointed(self._folder, name)) is not None:
            try:
                record = format.described(self._folder, step)
            except BrokenCheckpointError:  # deleted meanwhile: there is a newer one
                return None
            if self._sent.get(step) != record:
                self._send(record)
                self._sent[step] = record
        return step

    def _send(self, record: Record) -> None:
        began, folder, known = time.monotonic(), folder_of(record.step), None
        with suppress(AbsentError, BrokenCheckpointError):
            known = record_of(self._store, record.step)
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
    def _held(self, record: Record) -> Iterator[Path]:
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
        if not self._store.read_object(PLACE):
            self._send_copy(PLACE)
        for name in RUN_FILES:
            self._send_copy(name)
        if code := read_code(self._writer.run):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:gz") as archive:
                for name, content in code.items():
                    item = tarfile.TarInfo(f"code/{name}")
                    item.size = len(content)
                    archive.addfile(item, io.BytesIO(content))
            self._store.write(packed.getvalue(), CODE)
        self._is_described = True

    def _send_copy(self, name: str) -> None:
        """As it is now: it may grow while it is sent."""
        with suppress(FileNotFoundError):
            self._store.write(fileio.read_bytes(self._writer.run.path / name, LONGEST_RECORD), name)

    def _say(self, kind: str, **facts: object) -> None:
        with suppress(TrainkitError, OSError):
            self._writer.remark(kind, url=self._store.url, **facts)  # type: ignore[arg-type]
        again = terminal.command("resume", self._writer.run.path)
        said = {
            "upload_failed": f"Not sent to {self._store.url} for now: {facts.get('why')}. Training goes on.",
            "not_uploaded": f"The newest checkpoint is not in {self._store.url} yet. It goes there by: {again}",
        }
        if kind in said:
            print(said[kind], file=sys.stderr, flush=True)


def send_rest(run: RunDir, url: str, *, seconds: float = 60.0) -> str:
    """Send what is not in ``url`` yet of a run that nobody writes. Where it is then.

    Args:
        seconds: how long to go on when nothing comes through.

    Raises:
        UserError: the place cannot be used, or somebody writes the run.
        RunFailedError: not all of it is there.
    """
    with lease_on(run, Holder.me()) as lease:
        store = claim(url, run)
        writer = Attempt(run, max(run.attempts(), default=0), lease.check)
        uploads = Uploads(store, writer)
        if not uploads.finish(seconds):
            why, fix = "It did not answer, or broke off, for a minute.", "Give the same command again once it is back."
            if uploads.unreadable:
                why, fix = f"{uploads.unreadable}.", "Put the file itself there, and give the same command again."
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
        store = claim(url, writer.run)
        try:
            with store.patiently():
                steps = fetch_checkpoints(store, writer.run)
        except StoreError as problem:
            raise _unusable(url, problem) from None
        if steps:
            print(f"Fetched from {store.url}: step {', '.join(map(str, steps))}.", flush=True)
        uploads = Uploads(store, writer)
        uploads.look()  # what the attempt before this one had no time for
        return uploads

    return dist.together(opened)
