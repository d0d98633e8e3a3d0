"""Finding a checkpoint that is whole: the ranks that see its files share the work of looking at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.checkpoint import files
from trainkit.checkpoint.record import BrokenCheckpointError, Record, parse
from trainkit.checkpoint.source import Held, Seen, Sent, Source
from trainkit.checkpoint.stored import Stored, read_tensors
from trainkit.distributed.process_group import Distributed


@dataclass(frozen=True)
class Restored:
    """What was restored besides model and optimizer."""

    step: int
    state: Mapping[str, Any]
    """As it was given to `Checkpoints.save`, on every rank; a number that was not finite is None."""
    extra: Mapping[str, Mapping[str, Tensor]]
    """The extra tensors that were asked for: on rank 0's CPU, empty on the others."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    restored: Restored
    source: Callable[[str], Source]
    """Of a stem; every rank asks for the same."""


class Finder:
    """Every rank calls it; only rank 0 needs to see the folder."""

    def __init__(self, folder: Path, dist: Distributed) -> None:
        self._folder, self._dist = folder, dist

    def look(
        self,
        step: int,
        stems: Sequence[str],
        *,
        further: Sequence[str] = (),
        extra: Sequence[str] = (),
        accept: Callable[[Restored], object] = lambda _: None,
    ) -> Found | str:
        """The checkpoint of a step, or what is wrong with it; on every rank.

        Args:
            stems: what it must have.
            further: what it may have.
            extra: which of ``stems`` rank 0 reads at once.
            accept: raises ValueError, KeyError or TypeError for one that is of no use; called on rank 0.
        """
        dist = self._dist
        record, fault = self._described(step)
        told = dist.broadcast_json({"record": record.to_json() if record else None, "fault": fault})
        if told["record"] is None:
            return str(told["fault"])
        agreed = parse(told["record"].encode(), step)
        readers = [rank for rank, sees in enumerate(dist.gather_json(record == agreed)) if sees]
        there = [stem for stem in further if stem in agreed.stems]
        stored: dict[str, Stored] = {}
        restored = Restored(step, agreed.state, {stem: {} for stem in extra})
        fault = None
        try:
            names = [name for stem in [*stems, *there] for name in agreed.files_of(stem)]
            if dist.rank in readers:
                files.compare(self._folder, agreed, names[readers.index(dist.rank) :: len(readers)])
                stored = {stem: Stored(self._folder, agreed, stem) for stem in [*stems, *there]}
            if dist.is_main:
                tensors = {stem: read_tensors(self._folder, agreed, stem) for stem in extra}
                restored = Restored(step, agreed.state, tensors)
                accept(restored)
        except (BrokenCheckpointError, ValueError, KeyError, TypeError) as error:
            fault = str(error)
        for problem in dist.gather_json(fault):
            if problem is not None:
                return problem

        def source(stem: str) -> Source:
            if len(readers) == dist.world_size and stem in stored:
                return Seen(stored[stem])
            return Sent(stored.get(stem) or Held({}), dist)

        return Found(restored, source)

    def _described(self, step: int) -> tuple[Record | None, str | None]:
        try:
            return files.described(self._folder, step), None
        except BrokenCheckpointError as fault:
            return None, str(fault)
