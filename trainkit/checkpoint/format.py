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

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import UserError

LONGEST = 1 << 22
"""Bytes of a ``state.json``."""

_FORMATS = (1, 2)
"""The second has stems in several files; a checkpoint without such stems is still written as the first."""
_DEEPEST = 16
_FILE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}\.safetensors")
_ENDING = re.compile(r"(-[0-9]{5}-of-[0-9]{5})?\.safetensors\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class BrokenCheckpointError(Exception):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class FileFacts:
    """Size and hash that a file of a checkpoint must have."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a ``state.json``."""

    step: int
    state: Mapping[str, Any]
    """Plain values of the training; bounded, but else as they were given. Anybody may have edited them."""
    files: Mapping[str, FileFacts]

    @property
    def stems(self) -> set[str]:
        return {stem_of(name) for name in self.files}

    def files_of(self, stem: str) -> list[str]:
        """Names of a stem's files: ``model.safetensors``, or one of each rank that wrote some.

        Raises BrokenCheckpointError when there are none.
        """
        names = sorted(name for name in self.files if stem_of(name) == stem)
        if not names:
            raise BrokenCheckpointError(f"it has no {stem}.safetensors")
        return names

    def to_json(self) -> str:
        """The text of the file. A number that is not finite becomes null: JSON has no word for it."""
        files = {name: asdict(facts) for name, facts in self.files.items()}
        sharded = any(f"{stem_of(name)}.safetensors" != name for name in self.files)
        state = json.loads(json.dumps(jsonl.finite(self.state)))  # with the keys that will be read
        body = {"format": _FORMATS[sharded], "step": self.step, "state": state, "files": files}
        return json.dumps({**body, "sha256": checksum(body)}, indent=1) + "\n"


def file_name(stem: str, index: int, count: int) -> str:
    """Name of the ``index``-th of ``count`` files of a stem."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def stem_of(name: str) -> str:
    """The stem whose tensors a file of this name holds."""
    return _ENDING.sub("", name)


def parse(content: bytes, step: int) -> CheckpointManifest:
    """The record of the checkpoint of ``step``.

    Raises BrokenCheckpointError and says what is wrong with it.
    """
    try:
        body = fileio.parse(content)
    except ValueError as error:
        raise BrokenCheckpointError(f"state.json is not readable ({error})") from None
    if not isinstance(body, dict) or "sha256" not in body:
        raise BrokenCheckpointError("state.json has no checksum of its own")
    claimed = body.pop("sha256")
    if not _is_bounded(body):
        raise BrokenCheckpointError("state.json has numbers that are not finite, or is nested too deeply")
    if claimed != checksum(body):
        raise BrokenCheckpointError("state.json has been changed: its checksum does not match")
    if body.keys() != {"format", "step", "state", "files"} or body["format"] not in _FORMATS:
        raise BrokenCheckpointError("state.json is of another version of trainkit")
    state = body["state"]
    files = body["files"]
    if type(body["step"]) is not int or body["step"] != step:
        raise BrokenCheckpointError(f"state.json is that of step {body['step']}")
    if not isinstance(state, dict) or not isinstance(files, dict):
        raise BrokenCheckpointError("state.json has the wrong fields")
    return CheckpointManifest(step, state, {name: _facts(name, facts) for name, facts in files.items()})


def _facts(name: str, facts: object) -> FileFacts:
    if _FILE.fullmatch(name) is None:  # no folder, no way out of this one
        raise BrokenCheckpointError(f"state.json names a file {name[:80]!r}")
    if isinstance(facts, dict) and facts.keys() == {"bytes", "sha256"}:
        size = facts["bytes"]
        digest = facts["sha256"]
        if type(size) is int and size >= 0 and isinstance(digest, str) and _SHA256.fullmatch(digest):
            return FileFacts(size, digest)
    raise BrokenCheckpointError(f"state.json does not describe {name}")


def checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of a ``state.json`` without its checksum."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _is_bounded(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return depth < _DEEPEST and all(_is_bounded(item, depth + 1) for item in items)
    if isinstance(value, int):
        return abs(value) < 2**63
    return not isinstance(value, float) or math.isfinite(value)


_NAME = re.compile(r"step-([0-9]{8,15})")


def path_of(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint's folder; None for other names."""
    match = _NAME.fullmatch(name)
    if match is None or name != path_of(Path(), int(match[1])).name:
        return None
    return int(match[1])


def steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, whole or broken, ascending."""
    if not folder.is_dir():
        return []
    found: list[int] = []
    for entry in folder.iterdir():
        step = step_of(entry.name)
        if step is not None:
            found.append(step)
    return sorted(found)


def begin(folder: Path, step: int, may_write: Callable[[], None] = lambda: None) -> Path:
    """Make the folder in which the files of ``step`` are written, and remove what killed processes have left."""
    may_write()
    fileio.make_folder(folder, folder.parent)  # and it is no link, which the removal below would follow
    for left in folder.glob(".step-*.partial"):  # this step's or another's
        _remove(left)
    partial = partial_of(folder, step)
    fileio.make_folder(partial, folder.parent)
    return partial


@contextmanager
def new_file(partial: Path, name: str) -> Iterator[BinaryIO]:
    """A file of the checkpoint that is being written, which is on the disk when the block has ended. Raises OSError."""
    try:
        with fileio.create(partial / name, partial.parents[1]) as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        error.filename = error.filename or str(partial / name)  # which a write does not tell
        raise


def commit(folder: Path, record: CheckpointManifest, may_write: Callable[[], None] = lambda: None) -> None:
    """Give the checkpoint whose files are all written and flushed its name, and point ``latest`` at it.

    Raises:
        OSError: it could not be done; the checkpoints before it are as they were, and what was written is gone.
    """
    final = path_of(folder, record.step)
    partial = partial_of(folder, record.step)
    is_known = False
    try:
        with new_file(partial, "state.json") as out:
            out.write(record.to_json().encode())
        _flush(partial)
        may_write()
        with suppress(BrokenCheckpointError):
            is_known = verified(folder, record.step).files == record.files
        if is_known:
            # A second save of a step, after a validation that a stop request had cut short. Only its state is new, and
            # a whole checkpoint is never taken away to be put back.
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


def point(folder: Path, name: str, step: int) -> None:
    """Make ``latest`` or ``best`` name the checkpoint of ``step``, in one move."""
    place = folder / name
    if place.is_dir() and not place.is_symlink():  # a copy that followed the links
        number = 0
        while (folder / f"{name}-{number}").exists():
            number += 1
        aside = folder / f"{name}-{number}"
        os.rename(place, aside)
        terminal.warn(f"{place} is a folder and no link; it has been moved to {aside.name}.")
    fileio.link(place, path_of(folder, step).name, folder.parent)
    _flush(folder)


def pointed(folder: Path, name: str) -> int | None:
    """Step that ``latest`` or ``best`` names; None if it is not a link to a checkpoint of this folder."""
    link = folder / name
    return step_of(os.readlink(link)) if link.is_symlink() else None


def prune(folder: Path, keep: int, *, spared: int | None = None) -> None:
    """Delete all but the newest ``keep`` checkpoints, the ones that ``latest`` and ``best`` name, and that of step
    ``spared``."""
    named = {pointed(folder, "latest"), pointed(folder, "best"), spared}
    for step in steps(folder)[:-keep]:
        if step not in named:
            _delete(path_of(folder, step))
    for left in folder.glob(".step-*.deleted"):  # by a process that was killed while deleting
        shutil.rmtree(left, ignore_errors=True)


def verified(folder: Path, step: int) -> CheckpointManifest:
    """The record of a checkpoint whose files are as they were written.

    Raises BrokenCheckpointError and says what is wrong with it.
    """
    record = manifest_of(folder, step)
    compare(folder, record, record.files)
    return record


def manifest_of(folder: Path, step: int) -> CheckpointManifest:
    """The record of a checkpoint; its files are not looked at. Raises BrokenCheckpointError when it has none."""
    checkpoint = path_of(folder, step)
    try:
        if not stat.S_ISDIR(checkpoint.lstat().st_mode):
            raise BrokenCheckpointError("it is no folder")
        return parse(fileio.read_bytes(checkpoint / "state.json", LONGEST), step)
    except OSError as error:
        raise _unreadable(error) from None


def compare(folder: Path, record: CheckpointManifest, names: Iterable[str]) -> None:
    """Compare files of a checkpoint with its record. Raises BrokenCheckpointError when one is not as written."""
    try:
        for name in names:
            expected = record.files[name]
            with fileio.open_regular(path_of(folder, record.step) / name) as data:
                size = os.fstat(data.fileno()).st_size
                digest = ""
                if size == expected.bytes:  # else it is another file without a look at its content
                    digest = hashlib.file_digest(data, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto
            require_same(name, expected, size, digest)
    except OSError as error:
        raise _unreadable(error) from None


def require_same(name: str, expected: FileFacts, size: int, sha256: str) -> None:
    """Raise BrokenCheckpointError for a file that is not as it was written."""
    if size != expected.bytes:
        raise BrokenCheckpointError(f"{name} has {size} bytes instead of {expected.bytes}")
    if sha256 != expected.sha256:
        raise BrokenCheckpointError(f"the content of {name} has changed")


def _unreadable(error: OSError) -> BrokenCheckpointError:
    where = f": {error.filename}" if error.filename else ""
    return BrokenCheckpointError(f"{error.strerror}{where}")


def resolve(folder: Path, which: str) -> int:
    """Step of ``best``, ``latest`` or a number; of the newest checkpoint, and says so, where a link names none.

    Raises UserError when there is no such checkpoint.
    """
    known = steps(folder)
    if which in ("best", "latest"):
        step = pointed(folder, which)
        if step not in known and known:
            step = known[-1]
            terminal.warn(
                f"{folder / which} does not name a checkpoint of this run. Taking the newest, of step {step}."
            )
    else:
        step = int(which) if re.fullmatch("[0-9]{1,15}", which) else None
    if step is None or step not in known:
        why = f"Steps with a checkpoint: {', '.join(map(str, known)) or 'none'}."
        fix = "Use best, latest or a step."
        raise UserError(f"No checkpoint '{which}' in {folder}.", why=why, fix=fix)
    return step


def _delete(checkpoint: Path) -> None:
    """Rename a checkpoint, then delete it, so that half of one is never taken for a whole."""
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
