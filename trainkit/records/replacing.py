"""A file is complete or absent: it is written beside its place, and then takes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_private(file: Path, content: bytes) -> None:
    """A key, say: complete or absent, on the disk, and never readable for others, not even for a moment."""
    with replacing(file) as partial:
        partial.unlink(missing_ok=True)  # it may have been made readable for them
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Where to write what becomes ``file`` once the block ends well. Else that goes, and ``file`` is as it was.

    What a killed process has left there is written over by the next one.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        yield partial
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
