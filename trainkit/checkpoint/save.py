"""Saving and restoring with all ranks."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from trainkit import terminal
from trainkit.checkpoint import format
from trainkit.checkpoint import tensors as checkpoint_tensors
from trainkit.checkpoint.format import BrokenCheckpointError, FileFacts, Record, new_file, parse
from trainkit.checkpoint.state import (
    Held,
    Seen,
    Sent,
    Shares,
    Source,
    load_moments,
    load_weights,
    load_where_named,
    moments_of,
    weights_of,
)
from trainkit.checkpoint.tensors import Entry, Stored, read_tensors
from trainkit.distributed.process_group import Distributed
from trainkit.errors import DiskError, TrainkitError, UserError, error_from_json

# Finding a checkpoint that is whole: the ranks that see its files share the work of looking at them.


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
                format.compare(self._folder, agreed, names[readers.index(dist.rank) :: len(readers)])
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
            return format.described(self._folder, step), None
        except BrokenCheckpointError as fault:
            return None, str(fault)


# Files of ranks that do not see the run's folder: sent to rank 0 tensor by tensor, which writes them on their behalf.
#
# In a process group of its own, since it goes on behind training, whose collectives must not meet it.


def send(files: Mapping[str, Mapping[Entry, Tensor]], group: c10d.ProcessGroup) -> None:
    """Send this rank's files to rank 0."""
    told = {name: [_told(entry) for entry in held] for name, held in files.items()}
    content = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    c10d.send(torch.tensor([content.numel()]), dst=0, group=group)
    c10d.send(content, dst=0, group=group)
    for held in files.values():
        for entry in checkpoint_tensors.in_order(held):
            if entry.bytes:
                c10d.send(checkpoint_tensors.as_bytes(held[entry]), dst=0, group=group)


def receive(rank: int, folder: Path, group: c10d.ProcessGroup) -> dict[str, FileFacts]:
    """Write the files of ``rank`` into ``folder``.

    Raises:
        OSError: they could not be written; all that was sent has been taken nevertheless.
    """
    size = torch.zeros(1, dtype=torch.int64)
    c10d.recv(size, src=rank, group=group)
    content = torch.empty(int(size), dtype=torch.uint8)
    c10d.recv(content, src=rank, group=group)
    told: dict[str, list[Any]] = json.loads(content.numpy().tobytes())
    facts, problem = {}, None
    for name, entries in told.items():
        coming = [entry for entry in checkpoint_tensors.in_order(map(_entry, entries)) if entry.bytes]

        def next_bytes(entry: Entry, coming: list[Entry] = coming) -> Tensor:
            coming.remove(entry)
            data = torch.empty(entry.bytes, dtype=torch.uint8)
            c10d.recv(data, src=rank, group=group)
            return data

        try:
            if problem is None:
                with new_file(folder, name) as out:
                    facts[name] = checkpoint_tensors.write(out, [*map(_entry, entries)], next_bytes)
        except OSError as error:
            problem = error
        for entry in [*coming]:
            next_bytes(entry)
    if problem is not None:
        raise problem
    return facts


def _told(entry: Entry) -> list[Any]:
    return [entry.name, str(entry.dtype).removeprefix("torch."), entry.shape, entry.whole, entry.offset]


def _entry(told: Any) -> Entry:
    name, dtype, *sizes = told
    return Entry(name, getattr(torch, dtype), *(tuple(size) for size in sizes))


# Threads that work behind training.

_NICE = 10


def give_way() -> None:
    """Let threads that train go first where a core has both: the calling thread is in no hurry."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):
            nice = max(os.getpriority(os.PRIO_PROCESS, 0), _NICE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


# A copy of what is saved, so that training may go on while it is written.

Key = TypeVar("Key", bound=Hashable)


class Snapshot:
    """Memory for one copy of a rank's own share on the CPU, used again by every save: new memory costs more than the
    copy itself. Pinned where the tensors are on a GPU, so that it is the GPU that copies."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._warming: list[threading.Thread] = []

    def warm(self, tensors: Mapping[Key, Tensor]) -> None:
        """Begin to get memory for the first copy of ``tensors``, in a thread that gives way to those that train."""
        if self._buffers or self._warming:
            return  # what is there may be on its way to the disk
        self._warming.append(threading.Thread(target=self._warm, args=(tensors,), name="snapshot"))
        self._warming[-1].start()

    def take(self, tensors: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], Callable[[], None]]:
        """Copies of ``tensors``, and what waits until they are complete; the copies before are no more.

        What changes the tensors afterwards on the current stream does not change the copies.
        """
        for thread in self._warming:
            thread.join()
        self._warming.clear()
        copies = {key: self._buffer(key, value) for key, value in tensors.items()}
        self._buffers = {key: copy for key, copy in copies.items()}  # noqa: C416 - another type of keys
        if copies:
            torch._foreach_copy_([*copies.values()], [*tensors.values()], non_blocking=True)
        if any(value.is_cuda for value in tensors.values()):
            copied = torch.cuda.Event()
            copied.record()
            return copies, copied.synchronize
        return copies, lambda: None

    def _warm(self, tensors: Mapping[Key, Tensor]) -> None:
        give_way()
        with suppress(RuntimeError):  # no memory: `take` says so, if that is still so by then
            for key, value in tensors.items():
                buffer = self._buffers[key] = self._buffer(key, value)
                # The kernel gives a page when it is first written to.
                buffer.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].zero_()

    def _buffer(self, key: Hashable, value: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and known.shape == value.shape and known.dtype == value.dtype:
            return known
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)


# A checkpoint on its way to the disk, behind training: at most one at a time.
#
# First every rank writes its files; once all have, rank 0 commits. No rank waits: each says now and then which phase
# is over for it (in a vote that training holds anyway), and the ranks go on to the next one together. Collectives are
# the main thread's alone.

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
                    format.abandon(self._folder, flight.sketch.step)
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
                self._folder, sketch.step, lambda: format.begin(self._folder, sketch.step, self._may_write)
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
                    format.abandon(self._folder, sketch.step)
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
        token = format.partial_of(self._folder, step) / f".{self._dist.broadcast_json(secrets.token_hex(8))}"
        if self._dist.is_main:
            with suppress(OSError):  # then all send, and rank 0 says what is wrong when it writes
                format.new_file(token.parent, token.name).close()
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
            send(held, self._group)
            return {}
        folder, facts, problem = format.partial_of(self._folder, step), {}, None
        try:
            for name, named in held.items():
                with format.new_file(folder, name) as out:
                    facts[name] = checkpoint_tensors.write(
                        out,
                        [*named],
                        lambda it, of=named: checkpoint_tensors.as_bytes(of[it]),  # type: ignore[misc]
                    )
        except OSError as error:  # the others send nevertheless
            problem = error
        if self._dist.is_main:
            for rank in blind:
                assert self._group is not None
                facts |= receive(rank, folder, self._group)
        if problem is not None:
            raise problem
        return facts

    def _commit(self, sketch: Sketch, facts: _Facts) -> _Facts:
        if self._dist.is_main:
            format.commit(self._folder, Record(sketch.step, sketch.state, facts), self._may_write)
            if sketch.best_step is not None and sketch.best_step in format.steps(self._folder):
                format.point(self._folder, "best", sketch.best_step)
            format.prune(self._folder, self._keep)
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


class Checkpoints:
    """The checkpoints of one run. Every rank calls every method, but only rank 0 needs to see the folder.

    A rank that sees it writes its own shards and reads what it needs; for one that does not, rank 0 does.

    Args:
        keep: how many to keep besides the best.
        may_write: raises TrainkitError when this process no longer writes this run; asked on rank 0, before anything is
            written and again before a checkpoint takes its place.
        asynchronous: `save` returns once it has a copy in memory (one of a rank's own share, kept for the next); what
            comes of it, `go_on` or `settle` says.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        dist: Distributed,
        may_write: Callable[[], None] = lambda: None,
        asynchronous: bool = False,
    ) -> None:
        self._folder, self._dist, self._finder = folder, dist, Finder(folder, dist)
        self._writer = Checkpointer(folder, keep=keep, dist=dist, may_write=may_write, asynchronous=asynchronous)
        self.over, self.go_on = self._writer.over, self._writer.go_on
        self.settle, self.close = self._writer.settle, self._writer.close

    def seconds_since_save(self) -> float:
        """Age of what is on the disk or on its way there, by this rank's clock; since the start, if nothing is."""
        return 0.0 if self._writer.is_busy else time.monotonic() - self._writer.saved

    def warm(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Say, after an update, what `save` will take: so that new memory for its first copy is there by then.

        Without it that copy takes several times as long. Nothing is done where saving is not asynchronous.
        """
        self._writer.warm({**_stems(model, optimizer), **(extra or {})})

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        step: int,
        state: Mapping[str, Any],
        best_step: int | None,
        extra: Mapping[str, Mapping[str, Tensor]] | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the checkpoint of ``step``, point ``latest`` and ``best``, delete what is no longer kept.

        Waits for the one before, if that is still on its way.

        Args:
            optimizer: None: its state is not kept.
            state: plain values, for `restore`.
            extra: file stem -> name -> tensor: what else belongs to it. A tensor may be sharded (a DTensor), the
                same on every rank, or on some ranks only, of which the lowest one's counts; every rank names the same
                stems.
            done: called on every rank, by `go_on` or `settle`, once it is durable.

        Raises:
            RunFailedError: it, or the one before, could not be written (a full disk); on every rank, or the others
                would wait in the next collective.
        """
        self._writer.start({**_stems(model, optimizer), **(extra or {})}, Sketch(step, state, best_step, done))

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        extra: Sequence[str] = (),
        into: Mapping[str, Mapping[str, Tensor]] | None = None,
        accept: Callable[[Restored], object] = lambda _: None,
    ) -> Restored | None:
        """Load the newest whole checkpoint into model and optimizer; None if there is none.

        Broken ones are passed over, and said so on stderr.

        Args:
            extra: stems of the extra tensors to read.
            into: file stem -> name -> tensor as `save` took it: filled in place, sharded or not, where the checkpoint
                has that stem and name, else left as it is; every rank names the same stems.
            accept: raises ValueError, KeyError or TypeError for one that is whole but of no use, with the reason; it is
                then passed over too. Called on rank 0, before anything is loaded.

        Raises:
            UserError: it is that of another model; on every rank.
        """
        self.settle()
        stems = ["model", *([] if optimizer is None else ["optimizer"]), *extra]
        for step in self._told_steps():
            found = self._finder.look(step, stems, further=[*(into or {})], extra=extra, accept=accept)
            if isinstance(found, str):
                self._say(step, found, "Trying the one before it")
                continue
            load_weights(model, found.source("model"), self._dist)
            if optimizer is not None:
                load_moments(model, optimizer, found.source("optimizer"), self._dist)
            for stem, named in (into or {}).items():
                load_where_named(named, found.source(stem), self._dist)
            return found.restored
        return None

    def holds(self, step: int, stem: str) -> bool:
        """Whether the checkpoint of ``step`` says that it has tensors ``stem``; False if it is broken."""
        held = False
        if self._dist.is_main:
            with suppress(BrokenCheckpointError):
                held = stem in format.described(self._folder, step).stems
        return self._dist.broadcast_json(held)

    def state_of(self, step: int) -> dict[str, Any]:
        """The plain values in the checkpoint of ``step``; none if it is broken."""
        state: dict[str, Any] = {}
        if self._dist.is_main:
            with suppress(BrokenCheckpointError):
                state = dict(format.described(self._folder, step).state)
        return self._dist.broadcast_json(state)

    def load_weights(self, model: nn.Module, step: int, *, or_newest: bool = False, stem: str = "model") -> int:
        """Load only the weights of the checkpoint of ``step``; the step whose weights were loaded.

        Args:
            stem: ``model``, or ``ema``: the averaged ones.
            or_newest: if that one is broken or gone, take the newest whole one and say so on stderr.

        Raises:
            UserError: there is none, or it is that of another model; on every rank.
        """
        self.settle()
        others = [other for other in self._told_steps() if other != step]
        why = ""
        for candidate in [step, *(others if or_newest else [])]:
            found = self._finder.look(candidate, [stem])
            if isinstance(found, str):
                why = why or f"{found}."
                if or_newest:
                    self._say(candidate, found, "Taking the newest whole one instead")
                continue
            load_weights(model, found.source(stem), self._dist)
            return candidate
        raise UserError(
            f"The checkpoint of step {step} is broken{', and so are all others' if or_newest else ''}.",
            why=why,
            fix=f"Use another: {', '.join(map(str, others)) or 'there is none'}."
            if not or_newest
            else "Train again: `python -m jobs.submit` on the run's config.yaml.",
        )

    def _told_steps(self) -> list[int]:
        """Steps with a checkpoint, as rank 0 sees them, newest first."""
        return self._dist.broadcast_json(format.steps(self._folder)[::-1] if self._dist.is_main else [])

    def _say(self, step: int, fault: str, then: str) -> None:
        if self._dist.is_main:
            checkpoint = format.path_of(self._folder, step)
            print(f"Checkpoint {checkpoint} is broken: {fault}. {then}.", file=sys.stderr, flush=True)


def _stems(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Mapping[str, Tensor]]:
    # A model that computes in fp16 has fp32 weights to save; its buffers are saved as such.
    weights = {
        name: value.float() if value.dtype == torch.float16 else value for name, value in weights_of(model).items()
    }
    stems: dict[str, Mapping[str, Tensor]] = {"model": weights}
    if optimizer is not None:
        stems["optimizer"] = moments_of(model, optimizer)
    return stems
