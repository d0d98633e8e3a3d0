"""Code as names and contents: of a folder, and of the one archive that a run keeps. Either may be a stranger's."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from trainkit import reading

LARGEST_CODE = 1 << 26
MOST_FILES = 10_000
DEEPEST = 20
"""Folders on the way to a file of code."""


def read_tree(top: Path) -> dict[str, bytes] | None:
    """Every file below a folder, but for Python's caches; None where there is none, a link, or more than code has."""
    room, found = LARGEST_CODE, dict[str, bytes]()
    try:
        for turn, (folder, folders, files) in enumerate(os.walk(top)):
            if any(Path(folder, name).is_symlink() for name in folders):
                return None
            folders[:] = [name for name in folders if name != "__pycache__"]
            if turn > MOST_FILES or len(Path(folder).relative_to(top).parts) > DEEPEST:
                return None
            for path in [Path(folder, name) for name in files]:
                if path.is_symlink() or len(found) >= MOST_FILES:
                    return None
                with reading.open_regular(path) as file:
                    content = file.read(room + 1)
                room -= len(content)
                if room < 0:
                    return None
                found[str(path.relative_to(top))] = content
    except OSError:
        return None
    return found or None


def code_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 of names and contents, in hex."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(os.fsencode(f"{name}\0{len(content)}\0"))
        found.update(content)
    return found.hexdigest()


def packed(files: Mapping[str, bytes]) -> bytes:
    """A zip file, of the same bytes for the same code."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return content.getvalue()


def unpacked(file: Path) -> dict[str, bytes] | None:
    """What is in an archive of code; None for what `packed` never makes: it may be a stranger's."""
    room, found = LARGEST_CODE, dict[str, bytes]()
    try:
        with reading.open_regular(file) as content:
            reading.require_size(content, reading.LONGEST)  # its list of names is read at once
            with zipfile.ZipFile(content) as archive:
                items = archive.infolist()
                if len(items) > MOST_FILES or not are_of_code([item.filename for item in items]):
                    return None
                for item in items:
                    if item.compress_type != zipfile.ZIP_DEFLATED:
                        return None
                    with archive.open(item) as data:
                        found[item.filename] = data.read(room + 1)
                    room -= len(found[item.filename])
                    if room < 0:
                        return None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError):
        return None
    return found or None


def are_of_code(names: Sequence[str]) -> bool:
    """Whether each names another file below one folder, and none that Python has compiled."""
    paths = {name: PurePosixPath(name) for name in names}
    folders = {folder for path in paths.values() if len(path.parts) <= DEEPEST for folder in path.parents}
    return len(paths) == len(names) and all(
        str(path) == name and 0 < len(path.parts) <= DEEPEST and path not in folders and "\0" not in name
        and all(part not in ("/", "..", "__pycache__") and len(os.fsencode(part)) < 200 for part in path.parts)
        for name, path in paths.items()
    )  # fmt: skip
