"""The logs of an attempt's ranks, as they are written: of one rank as they are, of several told apart line by line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit import fileio

PART_BYTES = 1 << 20
LONGEST = 1 << 30
"""Bytes that are read at once. A file of 300 GB may take no room on a disk, and hold nothing."""


@dataclass
class RankLog:
    """One rank's file, read on from where the last look ended.

    Args:
        label: stands before every line.
        pattern: only lines in which it is found.
    """

    path: Path
    label: str = ""
    pattern: re.Pattern[str] | None = None
    _offset: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def new(self, *, to_the_end: bool = False) -> Iterator[str]:
        """What has been written since, in parts. Raises OSError where the file cannot be read.

        Args:
            to_the_end: nobody writes it any more, so a line without its end is one too.
        """
        with fileio.open_regular(self.path) as file:
            end = os.fstat(file.fileno()).st_size  # what comes while it is read is for the next look
            if end - self._offset > LONGEST:
                yield f"{self.label}--- left out: {end - self._offset - LONGEST:,} bytes of {self.path.name}\n"
                self._offset, self._rest = end - LONGEST, b""
            file.seek(self._offset)
            while self._offset < end and (part := file.read(min(PART_BYTES, end - self._offset))):
                self._offset += len(part)
                yield self._shown(part)
        if to_the_end and self._rest:
            yield self._shown(b"\n")

    def _shown(self, part: bytes) -> str:
        if not self.label and self.pattern is None:  # whatever stands there, lines or half of them: progress bars
            return part.decode(errors="replace")
        *whole, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > 16 * PART_BYTES:  # a line that nobody reads, and that would fill the memory
            whole, self._rest = [*whole, self._rest], b""
        lines = (line.decode(errors="replace") for line in whole)
        return "".join(f"{self.label}{line}\n" for line in lines if self.pattern is None or self.pattern.search(line))


def ranks_of(logs: Path) -> list[int]:
    """The ranks that have a log in this folder of an attempt."""
    names = [file.stem.removeprefix("rank-") for file in logs.glob("rank-*.out")]
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def logs_of(logs: Path, ranks: Sequence[int], *, ending: str, pattern: re.Pattern[str] | None) -> list[RankLog]:
    """The logs of these ranks; each line says whose it is if there are several.

    Args:
        ending: ``out`` or ``err``.
    """
    width = len(str(max(ranks, default=0)))
    labels = [f"[rank {rank:{width}}] " if len(ranks) > 1 else "" for rank in ranks]
    return [RankLog(logs / f"rank-{rank}.{ending}", label, pattern) for rank, label in zip(ranks, labels, strict=True)]
