"""A file is complete or absent: it is written beside its place, and then takes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
