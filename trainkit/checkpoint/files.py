"""A checkpoint on disk: a folder of safetensors files and one JSON file, complete or absent.

    checkpoints/step-00001000/model.safetensors       plain weights: `safetensors.torch.load_file` reads them
                              optimizer.safetensors
                              state.json              step, best value, ..., and size and SHA-256 of the files above
    checkpoints/latest -> step-00001000
    checkpoints/best   -> step-00000800

It is written beside its place, flushed to disk and then renamed; `state.json` is written last. So a process killed at
any moment leaves either the whole checkpoint or none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"step-(\d{8,})")


class BrokenCheckpointError(Exception):
    """A checkpoint that is not what was written."""


def path_of(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name)))


def write(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of ``step`` and point ``latest`` at it.

    Args:
        tensors: file stem -> name -> CPU tensor.
        state: plain values for ``state.json``.

    Raises:
        OSError: it could not be written; the checkpoints before it are as they were.
    """
    final = path_of(folder, step)
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed while saving
    partial.mkdir(parents=True)
    try:
        _fill(partial, step, tensors, state)
    except BaseException:  # a full disk: what is left would keep the next save from fitting
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if final.exists():  # broken, or `rewrite_state` would have been enough
        _delete(final)
    os.replace(partial, final)
    _flush(folder)
    point(folder, "latest", step)
    return final


def _fill(partial: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files = {}
    for stem, named in tensors.items():
        file = partial / f"{stem}.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in named.items()}, file)
        except SafetensorError as error:  # it wraps what the system said
            raise OSError(errno.EIO, str(error).removeprefix("Error while serializing: "), str(file)) from None
        _flush(file)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    record = partial / "state.json"
    record.write_text(json.dumps({**state, "step": step, "files": files}, indent=1), encoding="utf-8")
    _flush(record)
    _flush(partial)


def rewrite_state(folder: Path, step: int, state: Mapping[str, Any]) -> bool:
    """Replace what ``state.json`` says besides its files, in one move. False if there is no whole checkpoint.

    For a second save of the same step (after a validation that a stop request had cut short): the tensors are the same,
    and a whole checkpoint is never taken away to be written again.
    """
    try:
        files = read_state(folder, step)["files"]
    except BrokenCheckpointError:
        return False
    record = path_of(folder, step) / "state.json"
    partial = record.with_name(".state.json.partial")
    partial.write_text(json.dumps({**state, "step": step, "files": files}, indent=1), encoding="utf-8")
    _flush(partial)
    os.replace(partial, record)
    return True


def point(folder: Path, name: str, step: int) -> None:
    """Make ``latest`` or ``best`` name the checkpoint of ``step``, in one move."""
    link = folder / f".{name}.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(path_of(folder, step).name)
    os.replace(link, folder / name)


def pointed(folder: Path, name: str) -> int | None:
    """Step that ``latest`` or ``best`` names."""
    link = folder / name
    match = _NAME.fullmatch(os.readlink(link)) if link.is_symlink() else None
    return int(match[1]) if match else None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints and the ones that ``latest`` and ``best`` name."""
    named = {pointed(folder, "latest"), pointed(folder, "best")}
    for step in steps(folder)[:-keep]:
        if step not in named:
            _delete(path_of(folder, step))
    for left in folder.glob(".step-*.deleted"):  # by a process that was killed while deleting
        shutil.rmtree(left, ignore_errors=True)


def read_state(folder: Path, step: int) -> dict[str, Any]:
    """``state.json`` of a checkpoint whose files are all there as they were written.

    Raises BrokenCheckpointError and says what is wrong with it.
    """
    checkpoint = path_of(folder, step)
    try:
        state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        for name, expected in state["files"].items():
            file = checkpoint / name
            if file.stat().st_size != expected["bytes"]:
                raise BrokenCheckpointError(f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}")
            if _sha256(file) != expected["sha256"]:
                raise BrokenCheckpointError(f"the content of {name} has changed")
    except OSError as error:
        raise BrokenCheckpointError(f"{error.strerror}: {error.filename}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpointError(f"state.json is not readable ({error})") from None
    return state


def read_tensors(folder: Path, step: int, stem: str) -> dict[str, Tensor]:
    """Tensors of one file of a checkpoint, on the CPU."""
    from safetensors.torch import load_file

    loaded: dict[str, Tensor] = load_file(path_of(folder, step) / f"{stem}.safetensors")
    return loaded


def resolve(folder: Path, which: str) -> int:
    """Step of ``best``, ``latest`` or a number.

    Raises UserError when there is no such checkpoint.
    """
    step = int(which) if which.isdigit() else pointed(folder, which) if which in ("best", "latest") else None
    if step is None or not path_of(folder, step).is_dir():
        known = ", ".join(str(item) for item in steps(folder)) or "none"
        raise UserError(
            f"No checkpoint '{which}' in {folder}.",
            why=f"Steps with a checkpoint: {known}.",
            fix="Use best, latest or a step.",
        )
    return step


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint that loses its name first, so that half of one is never taken for a whole."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    # hashlib.file_digest would be this, from Python 3.11 on.
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
