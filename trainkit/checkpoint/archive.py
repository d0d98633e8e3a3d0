"""A run as one file that can be handed on: a tar file, not compressed, for weights hardly shrink.

    config.yaml manifest.json plan.json metrics.jsonl events.jsonl labels.jsonl ...     as in the run folder
    code.zip
    checkpoints/step-00001000/model.safetensors, state.json, ...
    logs/0/rank-0.out ...                                         only if the user wants them to go
    pack.json             the run's name, `best` and `latest`, and SHA-256 of the files above; those of checkpoints are
                          in their state.json. The last, so that an archive that is cut short has none

What it unpacks to is no larger than the archive: it is neither compressed nor sparse. Each member must have a name that
a run's file has, and be a regular file. Nothing of it is run, and `trainkit.run.ownership` asks before its code is.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from trainkit.checkpoint import format
from trainkit.checkpoint.format import BrokenCheckpointError
from trainkit.checkpoint.remote import LONGEST_RECORD, RECORDS, RUN_FILES, folder_of, stage_at, take_numbers
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.run import code_files, events, secrets, snapshot
from trainkit.run.folder import RunDir, make_private

LAST = "pack.json"
_TEXTS = (*RUN_FILES, *RECORDS, "submit.sbatch")
_SAMPLES = re.compile(r"(system-[\w.-]{1,100}\.jsonl|nvidia-smi-[\w.-]{1,100}\.txt)")
_LOG = re.compile(r"logs/[0-9]{1,9}/rank-[0-9]{1,6}\.(out|err)")
_WEIGHTS = re.compile(r"checkpoints/(step-[0-9]{8,15})/(state\.json|[a-z][a-z0-9_-]{0,63}\.safetensors)")
_NAME = re.compile(r"[^\W_][\w.+-]{0,99}")
_NUMBERS = ("metrics.jsonl", "system-")
"""Begin the names of files in which there are numbers alone, and many of them."""
_WRONG: tuple[type[Exception], ...] = (BrokenCheckpointError, *fileio.BROKEN_TAR)
_MOST_MEMBERS = 100_000


def pack(run: RunDir, file: Path, steps: Sequence[int], *, optimizer: bool = False, logs: bool = False) -> list[str]:
    """Write the archive, which only this user can read. Returns the names of files in which something looked like a
    secret, and is ``***`` in the archive.

    Args:
        steps: of the checkpoints that go along.
        optimizer: with the optimizer's state, without which training cannot go on.
        logs: with what the ranks printed.

    Raises:
        UserError: there is a file of that name, it cannot be written, or something of the run cannot be read.
    """
    if os.path.lexists(file):
        raise UserError(
            f"{file} exists already.", why="It would be replaced.", fix="Give another name, or remove the file."
        )
    hidden: list[str] = []
    digests: dict[str, str] = {}
    try:
        with fileio.replacing(file, private=True) as out, tarfile.open(fileobj=out, mode="w") as archive:

            def add(name: str, size: int, content: IO[bytes]) -> None:
                member = tarfile.TarInfo(name)
                member.size = size
                member.mode = 0o600
                archive.addfile(member, content)

            for name, data in _texts(run, logs):
                text = data
                if name != "code.zip" and not name.startswith(_NUMBERS):
                    text = _without_secrets(name, data)
                if text != data:
                    hidden.append(name)
                digests[name] = hashlib.sha256(text).hexdigest()
                add(name, len(text), io.BytesIO(text))
            for step in steps:
                record = format.manifest_of(run.checkpoints, step)
                for name in record.files:
                    if optimizer or format.stem_of(name) != "optimizer":
                        with fileio.open_regular(format.path_of(run.checkpoints, step) / name) as content:
                            add(f"{folder_of(step)}/{name}", record.files[name].bytes, content)
                state = record.to_json().encode()
                add(f"{folder_of(step)}/state.json", len(state), io.BytesIO(state))
            named: dict[str, int] = {}
            for name in ("best", "latest"):
                pointed = format.pointed(run.checkpoints, name)
                if pointed is not None and pointed in steps:
                    named[name] = pointed
            last = json.dumps({"name": run.path.name, "files": digests, "named": named}, indent=1).encode()
            add(LAST, len(last), io.BytesIO(last))
    except (OSError, BrokenCheckpointError) as error:
        words = str(error)
        if isinstance(error, OSError):
            words = f"{error.strerror or error}: {error.filename or run.path}"
        fix = "Give a file on a disk with free space; if the checkpoint is broken, name another --checkpoint."
        raise UserError(f"Cannot pack {run.name}.", why=f"{words}.", fix=fix) from None
    return hidden


def _texts(run: RunDir, logs: bool) -> Iterator[tuple[str, bytes]]:
    names = [*_TEXTS, *sorted(name for name in os.listdir(run.path) if _SAMPLES.fullmatch(name))]
    if logs:
        names += sorted(str(path.relative_to(run.path)) for path in run.logs.glob("*/rank-*"))
    for name in names:
        if name in _TEXTS or _SAMPLES.fullmatch(name) or _LOG.fullmatch(name):
            with suppress(FileNotFoundError):
                yield name, fileio.read_bytes(run.path / name, LONGEST_RECORD)
    files = snapshot.read_code(run)
    if files:
        yield "code.zip", code_files.packed(files)


def _without_secrets(name: str, data: bytes) -> bytes:
    """The text with ``***`` for what looks like a credential, and JSON still."""
    text = data.decode(errors="replace")
    if not secrets.find(text, python=False):
        return data
    if not name.endswith((".json", ".jsonl")):
        return secrets.redacted(text, secrets.find(text, python=False)).encode()
    parts = text.splitlines() if name.endswith(".jsonl") else [text]
    lines: list[str] = []
    for part in parts:
        item = fileio.parse_object(part)
        if item is not None:
            lines.append(f"{json.dumps(_redacted(item))}\n")
    return "".join(lines).encode()


def _redacted(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _redacted(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, key) for item in value]
    if not isinstance(value, str):
        return value
    by_name = secrets.find(f'{key} = "{re.sub("[^ -~]", "", value)}"', python=True)
    return "***" if by_name else secrets.redacted(value, secrets.find(value, python=False))


def name_in(file: Path) -> str:
    """The name that the run in an archive had, if it may be that of a folder; else ``run``. Raises UserError."""
    with _opened(file) as archive:
        for member in archive:
            if member.name == LAST and member.isreg() and member.size <= fileio.MOST_BYTES:
                name = (fileio.parse_object(_content(archive, member).read()) or {}).get("name")
                return name if isinstance(name, str) and _NAME.fullmatch(name) else "run"
        raise tarfile.ReadError(f"it has no {LAST}: it is truncated, or not a packed run")


def unpack(file: Path, path: Path) -> RunDir:
    """Make the run folder ``path`` of an archive; it appears when it is whole.

    Raises:
        UserError: it is none that `pack` has made, or damaged; there is no room; the folder exists already.
    """
    if os.path.lexists(path):
        fix = "Give another folder with --run-dir, or another name with --name."
        raise UserError(f"{path} exists already.", why="A run is never overwritten.", fix=fix)
    with fileio.disk_errors_as(f"Cannot unpack {file}.", fix="Check the path, its permissions and its disk."):
        size = file.stat().st_size
        with _opened(file) as archive:  # or it is refused before anything is made
            archive.next()
        fileio.make_folder(path.parent)
        free = shutil.disk_usage(path.parent).free
        if size > free:
            why = f"The archive has {terminal.size(size)}, and {terminal.size(free)} are free there."
            fix = "Free some space, or give a folder on another disk with --run-dir."
            raise UserError(f"{file} does not fit into {path.parent}.", why=why, fix=fix)
        with stage_at(path.with_name(f".{path.name}.unpacked")) as stage:
            make_private(stage)
            run = RunDir(stage)
            with _opened(file) as archive:
                _require_whole(run, *_extract(archive, stage))
            events.unpacked(run)
            take_numbers(run)
            stage.rename(path)
    return RunDir(path)


def _extract(archive: tarfile.TarFile, stage: Path) -> tuple[dict[str, Any], set[str]]:
    """Write the members into a folder. Returns the content of ``pack.json``, and the members' names.

    Raises what tarfile does.
    """
    there: set[str] = set()
    for member in archive:
        name = member.name
        is_weights = _WEIGHTS.fullmatch(name)
        is_known = name in (*_TEXTS, "code.zip", LAST) or is_weights or _SAMPLES.fullmatch(name)
        if not (is_known or _LOG.fullmatch(name)) or (is_weights and format.step_of(is_weights[1]) is None):
            raise tarfile.ReadError(f"{name!r:.100} is not a file of a run")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            raise tarfile.ReadError(f"{name} is not a regular file in it")
        if name in there or len(there) >= _MOST_MEMBERS:
            raise tarfile.ReadError(f"{name} is there twice" if name in there else "it has too many files")
        if member.size > LONGEST_RECORD and not is_weights:
            raise tarfile.ReadError(f"{name} has {member.size:,} bytes")
        content = _content(archive, member)
        if name == LAST:
            told = fileio.parse_object(content.read(fileio.MOST_BYTES))
            if told is None:
                break
            return told, there
        fileio.make_folder((stage / name).parent, stage)
        with fileio.create(stage / name, stage) as out:
            shutil.copyfileobj(content, out)
        there.add(name)
    raise tarfile.ReadError(f"it has no {LAST}: it is truncated, or not a packed run")


def _require_whole(run: RunDir, told: dict[str, Any], there: set[str]) -> None:
    """Compare what was unpacked with what was packed, and point at its checkpoints."""
    digests = told.get("files")
    named = told.get("named")
    if not isinstance(digests, dict) or not isinstance(named, dict):
        raise tarfile.ReadError(f"its {LAST} has the wrong fields")
    texts = {name for name in there if not _WEIGHTS.fullmatch(name)}
    for name in texts | digests.keys():
        if name not in texts or not run.config.is_file():
            raise tarfile.ReadError(f"{name} is missing in it")
        content = fileio.read_bytes(run.path / name, LONGEST_RECORD)
        if hashlib.sha256(content).hexdigest() != digests.get(name):
            raise tarfile.ReadError(f"the content of {name} has changed")
        if name == "code.zip" and code_files.unpacked(content) is None:
            raise tarfile.ReadError("its code.zip is not a snapshot of code")
    known = format.steps(run.checkpoints)
    for step in known:
        record = format.manifest_of(run.checkpoints, step)
        whole = [name for name in record.files if f"{folder_of(step)}/{name}" in there]
        if any(format.stem_of(name) == "model" and name not in whole for name in record.files):
            raise BrokenCheckpointError(f"the weights of step {step} are missing in it")
        format.compare(run.checkpoints, record, whole)
    for name in ("best", "latest"):
        for step in known:
            if named.get(name) == step:
                format.point(run.checkpoints, name, step)


@contextmanager
def _opened(file: Path) -> Iterator[tarfile.TarFile]:
    """An archive to read; whatever the block, or tarfile, finds wrong with it becomes a UserError."""
    fix = f"Give a file that `{terminal.command('pack')}` has written."
    with fileio.disk_errors_as(f"Cannot read {file}.", fix=fix):
        content = fileio.open_regular(file, follow=True)
    try:
        with content, tarfile.open(fileobj=content, mode="r:", tarinfo=fileio.TarMember) as archive:
            yield archive
    except _WRONG as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise UserError(
            f"{file} is not a file of `{terminal.command('pack')}`, or is damaged.",
            why=f"{terminal.one_line(error) or 'It is cut short'}.",
            fix="Have it packed and copied again; if it was compressed, decompress it first.",
        ) from None


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    return cast(IO[bytes], archive.extractfile(member))  # of a regular file it is one
