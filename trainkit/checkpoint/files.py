"""A checkpoint on disk: a folder of safetensors files and one JSON file, complete or absent.

    checkpoints/step-00001000/model.safetensors       plain weights: `safetensors.torch.load_file` reads them
                              optimizer.safetensors   or one file of each rank, if each has a part:
                              optimizer-00001-of-00002.safetensors
                              state.json              step, best value, ..., size and SHA-256 of the files above, and
                                                      a checksum of its own
    checkpoints/latest -> step-00001000
    checkpoints/best   -> step-00000800

It is written beside its place, flushed to disk and then renamed; `state.json` is written last. So a process killed at
any moment leaves either the whole checkpoint or none. What is read is compared with what was written: a disk flips
bits, a copy stops half way, and a folder may come from a stranger.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainkit.checkpoint.record import LONGEST, BrokenCheckpointError, FileFacts, Record, file_name, parse
from trainkit.errors import UserError
from trainkit.records import files

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"step-([0-9]{8,15})")


def path_of(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint's folder; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and name == path_of(Path(), int(match[1])).name else None


def steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, whole or broken, ascending."""
    if not folder.is_dir():
        return []
    return sorted(step for entry in folder.iterdir() if (step := step_of(entry.name)) is not None)


def write(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    may_write: Callable[[], None] = lambda: None,
) -> Path:
    """Write the checkpoint of ``step``, in this process alone, and point ``latest`` at it.

    Args:
        tensors: file stem -> name -> tensor.
        state: plain values for ``state.json``.
        may_write: raises when this process no longer writes this run; asked before the first byte and the last move.

    Raises:
        OSError: it could not be written; the checkpoints before it are as they were.
    """
    from trainkit.checkpoint import tensorfile

    partial = begin(folder, step, may_write)
    facts = {}
    try:
        for stem, named in tensors.items():
            entries = [tensorfile.Entry.of(name, value) for name, value in named.items()]
            name = file_name(stem, 0, 1)
            with new_file(partial, name) as out:
                facts[name] = tensorfile.write(out, entries, lambda it, of=named: tensorfile.as_bytes(of[it.name]))  # type: ignore[misc]
    except BaseException:
        abandon(folder, step)
        raise
    commit(folder, Record(step, state, facts), may_write)
    return path_of(folder, step)


def begin(folder: Path, step: int, may_write: Callable[[], None] = lambda: None) -> Path:
    """Make the folder in which the files of ``step`` are written; what killed processes have left of such goes."""
    may_write()
    files.make_folder(folder, folder.parent)  # and it is no link, which the removal below would follow
    for left in folder.glob(".step-*.partial"):  # this step's or another's
        _remove(left)
    partial = partial_of(folder, step)
    files.make_folder(partial, folder.parent)
    return partial


def new_file(partial: Path, name: str) -> BinaryIO:
    """A file of the checkpoint that is being written; unbuffered. Raises OSError."""
    return files.create(partial / name, partial.parents[1], buffering=0)


def commit(folder: Path, record: Record, may_write: Callable[[], None] = lambda: None) -> None:
    """Give the checkpoint whose files are all written and flushed its name, and point ``latest`` at it.

    Raises:
        OSError: it could not be done; the checkpoints before it are as they were, and what was written is gone.
    """
    final, partial = path_of(folder, record.step), partial_of(folder, record.step)
    try:
        with new_file(partial, "state.json") as out:
            out.write(record.to_json().encode())
            os.fsync(out.fileno())
        _flush(partial)
        may_write()
        if _is_same(folder, record):
            # A second save of a step, after a validation that a stop request had cut short. Only what is said of it is
            # new, and a whole checkpoint is never taken away to be put back.
            os.replace(partial / "state.json", final / "state.json")
            _flush(final)
            _remove(partial)
        else:
            _delete(final)
            os.replace(partial, final)
            _flush(folder)
            _flush(folder.parent)  # the first one has made the folder
    except BaseException:
        abandon(folder, record.step)
        raise
    point(folder, "latest", record.step)


def abandon(folder: Path, step: int) -> None:
    """Remove what is written of ``step``: on a full disk it would keep the next save from fitting."""
    _remove(partial_of(folder, step))


def partial_of(folder: Path, step: int) -> Path:
    """Folder in which the checkpoint of a step is written."""
    return folder / f".{path_of(folder, step).name}.partial"


def _is_same(folder: Path, record: Record) -> bool:
    try:
        return verified(folder, record.step).files == record.files
    except BrokenCheckpointError:
        return False


def point(folder: Path, name: str, step: int) -> None:
    """Make ``latest`` or ``best`` name the checkpoint of ``step``, in one move."""
    place = folder / name
    if place.is_dir() and not place.is_symlink():  # a copy that followed the links
        aside = next(path for number in range(10**6) if not (path := folder / f"{name}-{number}").exists())
        os.rename(place, aside)
        _say(f"{place} is a folder and no link; it has been moved to {aside.name}.")
    files.link(place, path_of(folder, step).name, folder.parent)
    _flush(folder)


def pointed(folder: Path, name: str) -> int | None:
    """Step that ``latest`` or ``best`` names; None if it is not a link to a checkpoint of this folder."""
    link = folder / name
    return step_of(os.readlink(link)) if link.is_symlink() else None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints and the ones that ``latest`` and ``best`` name."""
    named = {pointed(folder, "latest"), pointed(folder, "best")}
    for step in steps(folder)[:-keep]:
        if step not in named:
            _delete(path_of(folder, step))
    for left in folder.glob(".step-*.deleted"):  # by a process that was killed while deleting
        shutil.rmtree(left, ignore_errors=True)


def verified(folder: Path, step: int) -> Record:
    """What a checkpoint says of itself, once its files are found to be as they were written.

    Raises BrokenCheckpointError and says what is wrong with it.
    """
    record = described(folder, step)
    compare(folder, record, record.files)
    return record


def described(folder: Path, step: int) -> Record:
    """What a checkpoint says of itself; its files have not been looked at.

    Raises BrokenCheckpointError when it says nothing.
    """
    checkpoint = path_of(folder, step)
    try:
        if not stat.S_ISDIR(checkpoint.lstat().st_mode):
            raise BrokenCheckpointError("it is no folder")
        with _open(checkpoint / "state.json") as file:
            return parse(file.read(LONGEST + 1)[: LONGEST + 1], step)
    except OSError as error:
        raise BrokenCheckpointError(f"{error.strerror}: {error.filename}") from None


def compare(folder: Path, record: Record, names: Iterable[str]) -> None:
    """Look at files of a checkpoint.

    Raises BrokenCheckpointError when one is not as it was written.
    """
    try:
        for name in names:
            _compare(path_of(folder, record.step) / name, record.files[name])
    except OSError as error:
        raise BrokenCheckpointError(f"{error.strerror}: {error.filename}") from None


def resolve(folder: Path, which: str) -> int:
    """Step of ``best``, ``latest`` or a number; of the newest checkpoint, and says so, where a link names none.

    Raises UserError when there is no such checkpoint.
    """
    known = steps(folder)
    if which in ("best", "latest"):
        step = pointed(folder, which)
        if step not in known and known:
            _say(f"{folder / which} does not name a checkpoint of this run. Taking the newest, of step {known[-1]}.")
            step = known[-1]
    else:
        step = int(which) if re.fullmatch("[0-9]{1,15}", which) else None
    if step is None or step not in known:
        raise UserError(
            f"No checkpoint '{which}' in {folder}.",
            why=f"Steps with a checkpoint: {', '.join(map(str, known)) or 'none'}.",
            fix="Use best, latest or a step.",
        )
    return step


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _compare(file: Path, expected: FileFacts) -> None:
    with _open(file) as data:
        size = os.fstat(data.fileno()).st_size
        if size != expected.bytes:
            raise BrokenCheckpointError(f"{file.name} has {size} bytes instead of {expected.bytes}")
        if _sha256(data) != expected.sha256:
            raise BrokenCheckpointError(f"the content of {file.name} has changed")


def _open(file: Path) -> Any:
    """Open a plain file: no link that leads elsewhere, and no pipe that never answers."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BrokenCheckpointError(f"{file.name} is no plain file")
    return open(descriptor, "rb")


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint that loses its name first, so that half of one is never taken for a whole."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        doomed = checkpoint.with_name(f".{checkpoint.name}.deleted")
        _remove(doomed)
        os.replace(checkpoint, doomed)
        checkpoint = doomed
    _remove(checkpoint)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(data: BinaryIO) -> str:
    # hashlib.file_digest would be this, from Python 3.11 on.
    digest = hashlib.sha256()
    while block := data.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
