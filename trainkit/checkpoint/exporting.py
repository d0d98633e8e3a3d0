"""The weights of a checkpoint as one file that other libraries load, however many files the checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainkit.checkpoint import files, tensorfile
from trainkit.checkpoint.record import BrokenCheckpointError
from trainkit.checkpoint.stored import Stored
from trainkit.checkpoint.tensorfile import Entry
from trainkit.errors import UserError
from trainkit.records.files import replacing


def export(folder: Path, which: str, stems: tuple[str, ...], file: Path, notes: Mapping[str, str]) -> tuple[int, str]:
    """Write the weights of a checkpoint (``best``, ``latest`` or a step) to ``file``; its step, and the stem taken.

    The file is complete or absent, and replaces one that is there. One tensor at a time is in memory.

    Args:
        stems: the first of these that the checkpoint has.
        notes: for the file's metadata, besides ``format`` and ``step``.

    Raises:
        UserError: there is no such checkpoint, it is broken, or the file cannot be written.
    """
    step = files.resolve(folder, which)
    try:
        record = files.described(folder, step)
        stem = next((stem for stem in stems if stem in record.stems), stems[-1])
        files.compare(folder, record, record.files_of(stem))
        stored = Stored(folder, record, stem)
        _write(file, stored, {"format": "pt", "step": str(step), **notes})
    except BrokenCheckpointError as fault:
        others = ", ".join(str(other) for other in files.steps(folder) if other != step)
        raise UserError(
            f"The checkpoint of step {step} cannot be exported.",
            why=f"{fault}.",
            fix=f"Use another: {others or 'there is none'}.",
        ) from None
    except OSError as problem:
        raise UserError(
            f"{file} cannot be written.", why=f"{problem.strerror}.", fix="Give another place, or make room."
        ) from None
    return step, stem


def _write(file: Path, stored: Stored, notes: Mapping[str, str]) -> None:
    entries = [Entry(name, dtype, shape, shape, (0,) * len(shape)) for name, (dtype, shape) in stored.facts.items()]
    with replacing(file) as out:
        tensorfile.write(out, entries, lambda entry: tensorfile.as_bytes(stored.read(entry.name)), notes)
