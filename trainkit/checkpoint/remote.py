"""A run's copy in a bucket or another folder (`checkpoint.remote`): its files, and whose it is.

`uploads` sends it behind the training; here it is claimed, and fetched.

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
import re
import shutil
import tarfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import IO, cast

from trainkit.checkpoint import format
from trainkit.checkpoint.format import BrokenCheckpointError, CheckpointManifest
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.common.object_store import LONGEST_OBJECT, AbsentError, Store, StoreError
from trainkit.run.code_files import LARGEST_CODE, are_of_code, contents
from trainkit.run.events import attempts_that
from trainkit.run.folder import CLAIM, REMOTE, RunDir, make_private
from trainkit.run.snapshot import write_tree

PLACE = REMOTE.name
POINTERS = "pointers.json"
CODE = "code.tar.gz"
RUN_FILES = ("config.yaml", "manifest.json", "plan.json")
RECORDS = (
    "metrics.jsonl", "task.json", "evaluations.jsonl", "events.jsonl", "summary.json", "confusion.json",
    "mistakes-val.json", "mistakes-test.json", "labels.jsonl",
)  # fmt: skip
LONGEST_RECORD = 1 << 30
"""Bytes of a record."""
LONGEST_CODE = 2 * LARGEST_CODE
"""Bytes of the unpacked archive of code."""


def pointers(store: Store) -> dict[str, int]:
    """Steps that ``latest`` and ``best`` name in a run's copy, without what is absent or unreadable."""
    named: dict[str, int] = {}
    told = store.read_object(POINTERS)
    for name in ("latest", "best"):
        step = told.get(name)
        if type(step) is int and 0 <= step < 10**15:
            named[name] = step
    return named


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


def record_of(store: Store, step: int) -> CheckpointManifest:
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
    own = own_place(run)
    remote = remote.rstrip("/")
    url = f"{remote}/{run.path.name}"
    if (run.path.parent / "sweep.json").is_file():
        url = f"{remote}/{run.path.parent.name}/{run.path.name}"
    with suppress(ValueError):  # it is elsewhere
        if own and own["url"].startswith(f"{remote}/"):
            fileio.inside(Path(), own["url"].removeprefix(f"{remote}/"))
            url = own["url"]
    number = own["id"] if own else uuid.uuid4().hex
    content = json.dumps({"id": number, "url": url}).encode()
    store = Store(url)
    try:
        with store.patiently() if own else nullcontext():  # a new run learns at once that its place is wrong
            there = store.read_object(PLACE)
            if there and there.get("id") != number:
                what = f"There is already another run in {url}."
                why = "This run folder did not write it, and it would be lost."
                fix = f"Continue that run: `{terminal.command('resume', url)}`; or give another checkpoint.remote."
                raise UserError(what, why=why, fix=fix, key="checkpoint.remote")
            store.write(content, PLACE)
            if store.read(PLACE, limit=LONGEST_OBJECT) != content:
                raise StoreError("a file that was written there reads back differently")
    except StoreError as error:
        raise unusable(url, error) from None
    if own is None or own["url"] != url:
        fileio.write(run.path / PLACE, content, run.path)
    return store


def unusable(url: str, error: StoreError) -> UserError:
    keys = "AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; GOOGLE_APPLICATION_CREDENTIALS"
    fix = f"Check the bucket's name, its region, and the credentials in the environment ({keys})."
    return UserError(f"{url} cannot be used.", why=f"{error}.", fix=fix, key="checkpoint.remote")


def own_place(run: RunDir) -> dict[str, str] | None:
    """Number and URL of the run's copy, as its folder says; None without such a copy."""
    told = fileio.read_object(run.path / PLACE)
    if re.fullmatch("[0-9a-f]{32}", str(told.get("id"))) and isinstance(told.get("url"), str):
        return told
    return None


def fetch_run(
    url: str, root: Path, *,
    weights_only: bool = False, records_only: bool = False, check: Callable[[RunDir], None] | None = None,
) -> RunDir:  # fmt: skip
    """Make the folder of the run whose copy is at ``url``, in ``root``; or bring the one that is there up to date.

    Args:
        weights_only: leave out the states of optimizers.
        records_only: leave out all checkpoints.
        check: called with the run's records before its checkpoints are fetched; what it raises leaves nothing here.

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
                _fetch_folder(store, path, weights_only, records_only, check)
            else:
                run = RunDir(path)
                own = own_place(run)
                if own is None or own["id"] != place["id"]:
                    why = f"The one in {url} has the same name."
                    fix = "Rename that folder, or set TRAINKIT_RUNS to another."
                    raise UserError(f"{path} is another run.", why=why, fix=fix)
                if check is not None:
                    check(run)
                fetch_checkpoints(store, run)
    except StoreError as error:
        raise unusable(url, error) from None
    return RunDir(path)


def _fetch_folder(
    store: Store, path: Path, weights_only: bool, records_only: bool, check: Callable[[RunDir], None] | None
) -> None:
    with stage_at(path.with_name(f".{path.name}.fetched")) as outer:
        make_private(outer)
        stage = outer / path.name
        make_private(stage)
        run = RunDir(stage)
        for name in (*RUN_FILES, *RECORDS, PLACE):
            with suppress(AbsentError) if name != "config.yaml" else nullcontext():
                fileio.write(stage / name, store.read(name, limit=LONGEST_RECORD), stage)
        with suppress(AbsentError):  # a run that was started without a snapshot
            unpack_code(store.read(CODE, limit=LONGEST_CODE), stage)
        take_numbers(run)
        if check is not None:
            check(run)
        if not records_only:
            fetch_checkpoints(store, run, weights_only=weights_only)
        stage.rename(path)


def take_numbers(run: RunDir) -> None:
    """Make the log folders of the attempts that a run's record tells of: their numbers are taken."""
    fileio.make_folder(run.logs, run.path)
    for number in attempts_that(run, "started"):
        fileio.make_folder(run.attempt_logs(number), run.path)
        fileio.write(CLAIM.at(run.attempt_logs(number), 0), "", run.path)


def fetch_checkpoints(store: Store, run: RunDir, *, weights_only: bool = False) -> list[int]:
    """Fetch what ``latest`` and ``best`` name there, unless it is here or there is newer here. Returns their steps.

    Raises:
        StoreError: the place does not answer.
        UserError: there are checkpoints, and none of them is whole.
    """
    folder = run.checkpoints
    there = pointers(store)
    here = format.pointed(folder, "latest")
    if "latest" not in there or (here is not None and here >= there["latest"]):
        return []
    fetched: list[int] = []
    why = ""
    for step in dict.fromkeys(there.values()):
        try:
            if not format.path_of(folder, step).exists():
                _fetch_step(store, folder, step, weights_only)
            fetched.append(step)
        except (BrokenCheckpointError, AbsentError) as fault:
            why = f"{fault}."
            terminal.warn(f"The checkpoint of step {step} in {store.url} is broken: {fault}.")
    if not fetched:
        raise UserError(
            f"No checkpoint in {store.url} is complete.", why=why, fix="Train again: `python -m jobs.submit`."
        )
    latest = there["latest"]
    format.point(folder, "latest", latest if latest in fetched else fetched[0])
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
            digest = hashlib.sha256()
            size = 0
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
    content = contents(_code_in(packed))
    if content is None:
        raise StoreError(f"{CODE} was not written by a run")
    write_tree(content, into, into)


def _code_in(packed: bytes) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of an archive. Raises ValueError, or what tarfile raises, where it is not one of code."""
    # Unpacked before it is read as a tar file: a header of that may itself be as long as it likes.
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as compressed:
        unpacked = compressed.read(LONGEST_CODE + 1)
    if len(unpacked) > LONGEST_CODE:
        raise ValueError
    with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:", tarinfo=fileio.TarMember) as archive:
        items = list(archive)
        are_files = all(item.isfile() and item.name.startswith("code/") for item in items)  # no links, no devices
        if not are_files or not are_of_code([item.name.removeprefix("code/") for item in items]):
            raise ValueError
        for item in items:
            yield item.name, cast(IO[bytes], archive.extractfile(item))
