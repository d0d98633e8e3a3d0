"""Brings a run, or its checkpoints, back from elsewhere: verified, bounded, and nothing of it is run."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

from trainkit import reading, terminal
from trainkit.checkpoint import files, remote
from trainkit.checkpoint.record import BrokenCheckpointError, FileFacts, Record
from trainkit.checkpoint.remote import Pointers
from trainkit.checkpoint.store import AbsentError, Store, StoreError
from trainkit.errors import UserError
from trainkit.records.code_archive import are_of_code
from trainkit.records.events import read_events
from trainkit.records.files import make_folder, replacing, write
from trainkit.records.rundir import RunDir, make_private

T = TypeVar("T")

_TRIES = 6
_LONGEST_CODE = 256 << 20
_MOST_FILES = 20_000
_STAGE = ".fetching"


def fetch_run(url: str, root: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> RunDir:
    """Make the folder of the run whose copy is at ``url``, in ``root``; or bring the one that is there up to date.

    Args:
        wanted: which files of checkpoints.

    Raises:
        UserError: there is no run, none of its checkpoints is whole, or another run has its name here.
    """
    store = Store(url)
    try:
        place = _patiently(lambda: remote.small_object(store, remote.PLACE))
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
    here = files.pointed(folder, "latest")
    there = _patiently(lambda: Pointers.read(store))
    if there.latest is None or (here is not None and here >= there.latest):
        return []
    fetched, why = [], ""
    for step in there.steps:
        if files.path_of(folder, step).exists():
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
    files.point(folder, "latest", there.latest if there.latest in fetched else fetched[0])
    if there.best in fetched:
        files.point(folder, "best", there.best)
    return fetched


def _made(store: Store, path: Path, wanted: Callable[[str], bool]) -> RunDir:
    partial = path.with_name(f".{path.name}.fetched")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    make_private(partial)
    try:
        for name in (*remote.RUN_FILES, *remote.RECORDS, remote.PLACE):
            try:
                content = _patiently(lambda name=name: store.read(name, limit=remote.LONGEST_TEXT))  # type: ignore[misc]
            except AbsentError:
                if name == "config.yaml":
                    raise
                continue
            write(partial / name, content, partial)
        with suppress(AbsentError):  # a run that was started without a snapshot
            _unpack(_patiently(lambda: store.read(remote.CODE, limit=_LONGEST_CODE)), partial)
        run = RunDir(partial)
        make_folder(run.logs, partial)
        for event in read_events(run, "started"):  # their numbers are taken
            if type(event.get("attempt")) is int:
                make_folder(run.attempt_logs(event["attempt"]), partial)
                write(run.attempt_logs(event["attempt"]) / "node-0", "", partial)
        bring_back(store, run, wanted=wanted)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return RunDir(path)


def _fetch_step(store: Store, folder: Path, step: int, wanted: Callable[[str], bool]) -> None:
    record = _patiently(lambda: remote.record_of(store, step))
    stage = folder / _STAGE
    make_folder(folder, folder.parent)
    shutil.rmtree(stage, ignore_errors=True)
    make_folder(stage, folder.parent)
    try:
        for name, facts in record.files.items():
            if wanted(name):
                _patiently(lambda name=name, facts=facts: _fetch_file(store, record, name, facts, stage / name))  # type: ignore[misc]
        write(stage / "state.json", record.to_json(), folder.parent)
        stage.rename(files.path_of(folder, step))
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _fetch_file(store: Store, record: Record, name: str, facts: FileFacts, into: Path) -> None:
    digest, size = hashlib.sha256(), 0
    with replacing(into, into.parents[2]) as out:
        for block in store.blocks(f"{remote.folder_of(record.step)}/{name}", facts.bytes):
            size += len(block)
            digest.update(block)
            out.write(block)
    if size != facts.bytes:
        raise BrokenCheckpointError(f"{name} has {size} bytes instead of {facts.bytes}")
    if digest.hexdigest() != facts.sha256:
        raise BrokenCheckpointError(f"the content of {name} has changed")


def _patiently(call: Callable[[], T]) -> T:
    """Try again what fails for other reasons than that it is not there."""
    for tried in range(_TRIES):
        try:
            return call()
        except AbsentError:
            raise
        except StoreError:
            if tried + 1 == _TRIES:
                raise
            time.sleep(2**tried / 2)
    raise AssertionError


def _unpack(packed: bytes, into: Path) -> None:
    """Files below ``code/``, and of these only what a snapshot holds (`are_of_code`)."""
    try:
        code = _code_in(packed)
    except reading.BROKEN_TAR as error:
        raise StoreError(f"{remote.CODE} is not what a run has written ({terminal.one_line(error)})") from None
    for name, content in code.items():
        make_folder((into / name).parent, into)
        write(into / name, content, into)


def _code_in(packed: bytes) -> dict[str, bytes]:
    # Unpacked before it is read as a tar file: a header of that may itself be as long as it likes.
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as compressed:
        content = compressed.read(_LONGEST_CODE + 1)
    left, found = _LONGEST_CODE, dict[str, bytes]()
    if len(content) > left:
        raise tarfile.TarError("it is too long")
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:", tarinfo=reading.TarMember) as archive:
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
