"""A checkpoint on its way to the disk, behind training: at most one at a time.

First every rank writes its files; once all have, rank 0 commits. No rank waits: each says now and then which phase is
over for it (in a vote that training holds anyway), and the ranks go on to the next one together. Collectives are the
main thread's alone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as c10d
from torch import Tensor

from trainkit import terminal
from trainkit.checkpoint import files, sending, tensorfile
from trainkit.checkpoint.priority import give_way
from trainkit.checkpoint.record import FileFacts, Record
from trainkit.checkpoint.shares import Shares
from trainkit.checkpoint.snapshot import Snapshot
from trainkit.checkpoint.tensorfile import Entry
from trainkit.distributed.process_group import Distributed
from trainkit.errors import DiskError, TrainkitError, error_from_json

_Files = Mapping[str, Mapping[Entry, Tensor]]
_Facts = dict[str, FileFacts]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Sketch:
    """A checkpoint that is to be: all but its tensors."""

    step: int
    state: Mapping[str, Any]
    best_step: int | None
    done: Callable[[], None]
    """Called on every rank once it is durable."""


class Background:
    """What a function does in a thread of its own, or at once."""

    def __init__(self, function: Callable[[], _Facts], *, asynchronous: bool) -> None:
        self._function = function
        self._facts: _Facts = {}
        self._error: BaseException | None = None
        # No daemon: a process that ends for some other reason leaves a whole checkpoint if it can.
        self._thread = threading.Thread(target=self._run, name="checkpoint") if asynchronous else None
        if self._thread is None:
            self._run()
        else:
            self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> _Facts:
        """Wait for it; what it returned or raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._facts

    def join(self) -> None:
        """Wait for it."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._thread is not None:
            give_way()
        try:
            self._facts = self._function()
        except BaseException as error:
            self._error = error


@dataclass
class _Flight:
    sketch: Sketch
    began: float
    commits: bool
    """The ranks' files are written, or are rank 0's alone: what goes on is the last phase."""
    work: Background


class Checkpointer:
    """Writes checkpoints into ``folder``. Every rank calls every method but `over`, at the same places."""

    def __init__(
        self, folder: Path, *, keep: int, dist: Distributed, may_write: Callable[[], None], asynchronous: bool
    ) -> None:
        self._folder, self._keep, self._dist, self._may_write = folder, keep, dist, may_write
        self._asynchronous = asynchronous
        self._shares, self._snapshot = Shares(dist), Snapshot()
        self._group: c10d.ProcessGroup | None = None
        self._flight: _Flight | None = None
        self._phase = 0
        self.saved = time.monotonic()
        """When what is on the disk was so far; at first, the start."""

    @property
    def is_busy(self) -> bool:
        return self._flight is not None

    def over(self) -> int:
        """How many phases are over for this rank."""
        return self._phase - (self._flight is not None and not self._flight.work.is_over)

    def go_on(self, over: int) -> None:
        """Go on if ``over`` phases are over for every rank.

        Raises:
            TrainkitError: the checkpoint could not be written; on every rank.
        """
        flight = self._flight
        if flight is None or over < self._phase:
            return
        facts, error = _tried(self._folder, flight.sketch.step, flight.work.result)
        if not flight.commits:
            told: list[Any] = self._dist.gather_json(
                {
                    "error": None if error is None else error.to_json(),
                    "files": {name: [fact.bytes, fact.sha256] for name, fact in (facts or {}).items()},
                }
            )
            self._flight = None
            if failed := [one["error"] for one in told if one["error"] is not None]:
                if self._dist.is_main:
                    files.abandon(self._folder, flight.sketch.step)
                raise error_from_json(failed[0])
            everything = {name: FileFacts(*fact) for one in told for name, fact in one["files"].items()}
            self._begin(flight.sketch, flight.began, lambda: self._commit(flight.sketch, everything), commits=True)
            return
        self._flight = None
        self._dist.raise_together(error)
        self.saved = flight.began
        flight.sketch.done()

    def settle(self) -> None:
        """Wait until nothing is on its way; raises as `go_on`."""
        while self._flight is not None:
            self.go_on(self._phase)

    def warm(self, stems: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Begin to get the memory for the first copy of these tensors, if any is taken."""
        if self._asynchronous:
            self._snapshot.warm(_keyed(self._shares.of(stems).files))

    def close(self) -> None:
        """Wait for what this rank still does. Nobody hears of it: something else has gone wrong, or all is settled."""
        if self._flight is not None:
            self._flight.work.join()

    def start(self, stems: Mapping[str, Mapping[str, Tensor]], sketch: Sketch) -> None:
        """Take a copy of the tensors and begin to write it.

        Raises:
            TrainkitError: it cannot be written; on every rank.
        """
        self.settle()
        began = time.monotonic()
        error = None
        if self._dist.is_main:
            _, error = _tried(
                self._folder, sketch.step, lambda: files.begin(self._folder, sketch.step, self._may_write)
            )
        self._dist.raise_together(error)
        share = self._shares.of(stems)
        blind: list[int] = []
        if share.writers != (0,):
            blind = [rank for rank in self._blind(sketch.step) if rank in share.writers]
        if blind and self._group is None:
            self._group = cast(c10d.ProcessGroup, c10d.new_group(backend="gloo"))
        held, wait = self._copied(share.files)

        def write() -> _Facts:
            wait()
            return self._write(sketch.step, held, blind)

        def write_and_commit() -> _Facts:
            try:
                facts = write()
            except BaseException:
                if self._dist.is_main:
                    files.abandon(self._folder, sketch.step)
                raise
            return self._commit(sketch, facts)

        alone = share.writers == (0,)
        self._begin(sketch, began, write_and_commit if alone else write, commits=alone)
        if not self._asynchronous:
            self.settle()

    def _begin(self, sketch: Sketch, began: float, work: Callable[[], _Facts], *, commits: bool) -> None:
        self._phase += 1
        self._flight = _Flight(sketch, began, commits, Background(work, asynchronous=self._asynchronous))

    def _blind(self, step: int) -> list[int]:
        """Ranks that do not see the folder in which rank 0 writes: machines need not share a disk."""
        token = files.partial_of(self._folder, step) / f".{self._dist.broadcast_json(secrets.token_hex(8))}"
        if self._dist.is_main:
            with suppress(OSError):  # then all send, and rank 0 says what is wrong when it writes
                files.new_file(token.parent, token.name).close()
        self._dist.barrier()
        sees = self._dist.gather_json(token.exists())
        if self._dist.is_main:
            token.unlink(missing_ok=True)
        return [rank for rank, seen in enumerate(sees) if not seen]

    def _copied(self, held: _Files) -> tuple[_Files, Callable[[], None]]:
        """This rank's share as it is now. What is written at once needs no copy."""
        if not self._asynchronous:
            return held, lambda: None
        copies, wait = self._snapshot.take(_keyed(held))
        return {name: {entry: copies[name, entry] for entry in named} for name, named in held.items()}, wait

    def _write(self, step: int, held: _Files, blind: list[int]) -> _Facts:
        """Write this rank's files and, on rank 0, those of the ranks that cannot."""
        if self._dist.rank in blind:
            assert self._group is not None
            sending.send(held, self._group)
            return {}
        folder, facts, problem = files.partial_of(self._folder, step), {}, None
        try:
            for name, named in held.items():
                with files.new_file(folder, name) as out:
                    facts[name] = tensorfile.write(out, [*named], lambda it, of=named: tensorfile.as_bytes(of[it]))  # type: ignore[misc]
        except OSError as error:  # the others send nevertheless
            problem = error
        if self._dist.is_main:
            for rank in blind:
                assert self._group is not None
                facts |= sending.receive(rank, folder, self._group)
        if problem is not None:
            raise problem
        return facts

    def _commit(self, sketch: Sketch, facts: _Facts) -> _Facts:
        if self._dist.is_main:
            files.commit(self._folder, Record(sketch.step, sketch.state, facts), self._may_write)
            if sketch.best_step is not None and sketch.best_step in files.steps(self._folder):
                files.point(self._folder, "best", sketch.best_step)
            files.prune(self._folder, self._keep)
        return {}


def _keyed(held: _Files) -> dict[tuple[str, Entry], Tensor]:
    return {(name, entry): value for name, named in held.items() for entry, value in named.items()}


def _tried(folder: Path, step: int, work: Callable[[], _T]) -> tuple[_T | None, TrainkitError | None]:
    """What ``work`` at the checkpoint of ``step`` gives, or why it could not be done, for all ranks to hear."""
    try:
        return work(), None
    except OSError as problem:
        return None, DiskError(
            f"The checkpoint of step {step} could not be written.",
            why=f"{problem.strerror}: {problem.filename}.",
            fix=f"Make room, then `{terminal.command('resume', folder.parent)}`; the checkpoint before it is whole.",
        )
    except TrainkitError as refusal:
        return None, refusal
