"""Saving and restoring with all ranks; a checkpoint may be written behind training."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from trainkit import terminal
from trainkit.checkpoint import format
from trainkit.checkpoint import state as checkpoint_tensors
from trainkit.checkpoint.format import BrokenCheckpointError, FileFacts, Record, new_file, parse
from trainkit.checkpoint.state import (
    Entry,
    Held,
    Sent,
    Shares,
    Source,
    Stored,
    load_moments,
    load_weights,
    load_where_named,
    moments_of,
    read_tensors,
    weights_of,
)
from trainkit.distributed.process_group import Distributed
from trainkit.errors import DiskError, TrainkitError, UserError, error_from_json

_Files = Mapping[str, Mapping[Entry, Tensor]]
"""File name -> entry -> a rank's part of it."""
_Facts = dict[str, FileFacts]
_Stems = Mapping[str, Mapping[str, Tensor]]
"""File stem -> name -> tensor."""
_T = TypeVar("_T")
Key = TypeVar("Key", bound=Hashable)


# Files of ranks that do not see the run's folder are sent to rank 0 tensor by tensor, which writes them on their
# behalf: in a process group of its own, since it goes on behind training, whose collectives must not meet it.


def send(files: _Files, group: c10d.ProcessGroup) -> None:
    """Send this rank's files to rank 0."""
    told = {
        name: [[it.name, str(it.dtype).removeprefix("torch."), it.shape, it.whole, it.offset] for it in held]
        for name, held in files.items()
    }
    content = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    c10d.send(torch.tensor([content.numel()]), dst=0, group=group)
    c10d.send(content, dst=0, group=group)
    for held in files.values():
        for entry in checkpoint_tensors.in_order(held):
            if entry.bytes:
                c10d.send(checkpoint_tensors.as_bytes(held[entry]), dst=0, group=group)


def receive(rank: int, folder: Path, group: c10d.ProcessGroup) -> _Facts:
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
    for name, listed in told.items():
        entries = [Entry(one, getattr(torch, dtype), *(tuple(size) for size in sizes)) for one, dtype, *sizes in listed]
        coming = [entry for entry in checkpoint_tensors.in_order(entries) if entry.bytes]

        def next_bytes(entry: Entry, coming: list[Entry] = coming) -> Tensor:
            coming.remove(entry)
            data = torch.empty(entry.bytes, dtype=torch.uint8)
            c10d.recv(data, src=rank, group=group)
            return data

        try:
            if problem is None:
                with new_file(folder, name) as out:
                    facts[name] = checkpoint_tensors.write(out, entries, next_bytes)
        except OSError as error:
            problem = error
        for entry in [*coming]:
            next_bytes(entry)
    if problem is not None:
        raise problem
    return facts


_NICE = 10


def give_way() -> None:
    """Let threads that train go first where a core has both: the calling thread is in no hurry."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):
            nice = max(os.getpriority(os.PRIO_PROCESS, 0), _NICE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class Snapshot:
    """Memory for one copy of a rank's own share, so that training goes on while it is written.

    It is used again by every save: new memory costs more than the copy itself. It is pinned where the tensors are on a
    GPU, so that the GPU copies.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._warming: threading.Thread | None = None

    def warm(self, tensors: Mapping[Key, Tensor]) -> None:
        """Begin to get memory for the first copy of ``tensors``, in a thread that gives way to those that train."""
        if not self._buffers and self._warming is None:  # what is there may be on its way to the disk
            self._warming = threading.Thread(target=self._warm, args=(tensors,), name="snapshot")
            self._warming.start()

    def take(self, tensors: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], Callable[[], None]]:
        """Copy ``tensors`` over the copies before; also returns a function that waits until the copies are complete.

        Changes of the tensors afterwards, on the current stream, do not change the copies.
        """
        if self._warming is not None:
            self._warming.join()
            self._warming = None
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


def _started(work: Callable[[], _Facts], *, asynchronous: bool) -> Future[_Facts]:
    """Do ``work`` in a thread of its own, or at once."""
    future: Future[_Facts] = Future()

    def run() -> None:
        if asynchronous:
            give_way()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    if asynchronous:
        # No daemon: a process that ends for some other reason leaves a whole checkpoint if it can.
        threading.Thread(target=run, name="checkpoint").start()
    else:
        run()
    return future


@dataclass(frozen=True)
class Restored:
    """What was restored besides model and optimizer."""

    step: int
    state: Mapping[str, Any]
    """As it was given to `Checkpoints.save`, on every rank; a number that was not finite is None."""
    extra: _Stems
    """The extra tensors that were asked for: on rank 0's CPU, empty on the others."""


@dataclass
class _Save:
    """A checkpoint on its way to the disk."""

    step: int
    state: Mapping[str, Any]
    best_step: int | None
    done: Callable[[], None]
    began: float = field(default_factory=time.monotonic)
    commits: bool = False
    """The last phase is under way: the ranks' files are written, or are rank 0's alone."""
    work: Future[_Facts] = field(default_factory=Future)


class Checkpoints:
    """The checkpoints of one run. Every rank calls every method but `over`, at the same places.

    Only rank 0 needs to see the folder. A rank that sees it writes its own shards and reads what it needs; for one that
    does not, rank 0 does.

    A save that is asynchronous goes behind training, one at a time: first every rank writes its files; once all have,
    rank 0 commits. No rank waits: each says now and then which phase is over for it (in a vote that training holds
    anyway), and the ranks go on to the next one together. Collectives are the main thread's alone.

    Args:
        keep: how many to keep besides the best.
        may_write: raises TrainkitError when this process no longer writes this run; asked on rank 0, before anything is
            written and again before a checkpoint takes its place.
        asynchronous: `save` returns once it has a copy in memory (one of a rank's own share, kept for the next);
            `go_on` and `settle` raise the save's errors.
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
        self._folder, self._keep, self._dist, self._may_write = folder, keep, dist, may_write
        self._asynchronous = asynchronous
        self._shares, self._snapshot = Shares(dist), Snapshot()
        self._group: c10d.ProcessGroup | None = None
        self._under_way: _Save | None = None
        self._phase = 0
        self._saved = time.monotonic()

    def seconds_since_save(self) -> float:
        """Age of what is on the disk or on its way there, by this rank's clock; since the start, if nothing is."""
        return 0.0 if self._under_way is not None else time.monotonic() - self._saved

    def warm(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: _Stems | None = None) -> None:
        """Say, after an update, what `save` will take, so that new memory for its first copy is there by then.

        Without it that copy takes several times as long. Nothing is done where saving is not asynchronous.
        """
        if self._asynchronous:
            files, _ = self._shares.of({**_stems(model, optimizer), **(extra or {})})
            self._snapshot.warm(_keyed(files))

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        step: int,
        state: Mapping[str, Any],
        best_step: int | None,
        extra: _Stems | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the checkpoint of ``step``, point ``latest`` and ``best``, delete what is no longer kept.

        Waits for the one before, if that is still on its way.

        Args:
            optimizer: None: its state is not kept.
            state: plain values, for `restore`.
            extra: further tensors. One may be sharded (a DTensor), the same on every rank, or on some ranks only, of
                which the lowest one's counts; every rank names the same stems.
            done: called on every rank, by `go_on` or `settle`, once it is durable.

        Raises:
            RunFailedError: it, or the one before, could not be written (a full disk); on every rank, or the others
                would wait in the next collective.
        """
        self.settle()
        save = _Save(step, state, best_step, done)
        error = None
        if self._dist.is_main:
            _, error = _tried(self._folder, step, lambda: format.begin(self._folder, step, self._may_write))
        self._dist.raise_together(error)
        files, writers = self._shares.of({**_stems(model, optimizer), **(extra or {})})
        alone = writers == (0,)
        blind = [] if alone else [rank for rank in self._blind(step) if rank in writers]
        if blind and self._group is None:
            self._group = cast(c10d.ProcessGroup, c10d.new_group(backend="gloo"))
        held, wait_for_copy = self._copied(files)

        def write() -> _Facts:
            wait_for_copy()
            return self._write(step, held, blind)

        def write_and_commit() -> _Facts:
            try:
                facts = write()
            except BaseException:
                if self._dist.is_main:
                    format.abandon(self._folder, step)
                raise
            return self._commit(save, facts)

        self._begin(save, write_and_commit if alone else write, commits=alone)
        if not self._asynchronous:
            self.settle()

    def over(self) -> int:
        """How many phases are over for this rank."""
        return self._phase - (self._under_way is not None and not self._under_way.work.done())

    def go_on(self, over: int) -> None:
        """Go on if ``over`` phases are over for every rank.

        Raises:
            TrainkitError: the checkpoint could not be written; on every rank.
        """
        save = self._under_way
        if save is None or over < self._phase:
            return
        facts, error = _tried(self._folder, save.step, save.work.result)
        self._under_way = None
        if save.commits:
            self._dist.raise_together(error)
            self._saved = save.began
            save.done()
            return
        told: list[Any] = self._dist.gather_json(
            {
                "error": None if error is None else error.to_json(),
                "files": {name: [fact.bytes, fact.sha256] for name, fact in (facts or {}).items()},
            }
        )
        if failed := [one["error"] for one in told if one["error"] is not None]:
            if self._dist.is_main:
                format.abandon(self._folder, save.step)
            raise error_from_json(failed[0])
        everything = {name: FileFacts(*fact) for one in told for name, fact in one["files"].items()}
        self._begin(save, lambda: self._commit(save, everything), commits=True)

    def settle(self) -> None:
        """Wait until nothing is on its way; raises as `go_on`."""
        while self._under_way is not None:
            self.go_on(self._phase)

    def close(self) -> None:
        """Wait for what this rank still does, and keep its errors: something else has gone wrong, or all is settled."""
        if self._under_way is not None:
            wait([self._under_way.work])

    def _begin(self, save: _Save, work: Callable[[], _Facts], *, commits: bool) -> None:
        self._phase += 1
        self._under_way, save.commits = save, commits
        save.work = _started(work, asynchronous=self._asynchronous)

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
        """This rank's share as it is now, and what waits for the copy. What is written at once needs none."""
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

    def _commit(self, save: _Save, facts: _Facts) -> _Facts:
        if self._dist.is_main:
            format.commit(self._folder, Record(save.step, save.state, facts), self._may_write)
            if save.best_step is not None and save.best_step in format.steps(self._folder):
                format.point(self._folder, "best", save.best_step)
            format.prune(self._folder, self._keep)
        return {}

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        extra: Sequence[str] = (),
        into: _Stems | None = None,
        accept: Callable[[Restored], object] = lambda _: None,
    ) -> Restored | None:
        """Load the newest whole checkpoint into model and optimizer; None if there is none.

        Broken ones are passed over, and said so on stderr.

        Args:
            extra: stems of the extra tensors to read.
            into: tensors as `save` took them: filled in place, sharded or not, where the checkpoint has that stem and
                name, else left as they are; every rank names the same stems.
            accept: raises ValueError, KeyError or TypeError for one that is whole but of no use, with the reason; it is
                then passed over too. Called on rank 0, before anything is loaded.

        Raises:
            UserError: it is that of another model; on every rank.
        """
        self.settle()
        stems = ["model", *([] if optimizer is None else ["optimizer"]), *extra]
        for step in self._told_steps():
            found = self._look(step, stems, further=[*(into or {})], extra=extra, accept=accept)
            if isinstance(found, str):
                self._say(step, found, "Trying the one before it")
                continue
            restored, source = found
            load_weights(model, source("model"), self._dist)
            if optimizer is not None:
                load_moments(model, optimizer, source("optimizer"), self._dist)
            for stem, named in (into or {}).items():
                load_where_named(named, source(stem), self._dist)
            return restored
        return None

    def _look(
        self,
        step: int,
        stems: Sequence[str],
        *,
        further: Sequence[str] = (),
        extra: Sequence[str] = (),
        accept: Callable[[Restored], object] = lambda _: None,
    ) -> tuple[Restored, Callable[[str], Source]] | str:
        """Look at the checkpoint of a step with all ranks that see its files. Returns what was restored, and where each
        stem's tensors come from (every rank asks for the same); or what is wrong with it, on every rank.

        Args:
            stems: what it must have.
            further: what it may have.
            extra: which of ``stems`` rank 0 reads at once.
            accept: see `restore`.
        """
        dist, record, fault = self._dist, None, None
        try:
            record = format.described(self._folder, step)
        except BrokenCheckpointError as broken:
            fault = str(broken)
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
                return stored[stem]
            return Sent(stored.get(stem) or Held({}), dist)

        return restored, source

    def holds(self, step: int, stem: str) -> bool:
        """Whether the checkpoint of ``step`` says that it has tensors ``stem``; False if it is broken."""
        return self._of_record(step, lambda record: stem in record.stems) or False

    def state_of(self, step: int) -> dict[str, Any]:
        """The plain values in the checkpoint of ``step``; none if it is broken."""
        return self._of_record(step, lambda record: dict(record.state)) or {}

    def _of_record(self, step: int, read: Callable[[Record], _T]) -> _T | None:
        found = None
        if self._dist.is_main:
            with suppress(BrokenCheckpointError):
                found = read(format.described(self._folder, step))
        return self._dist.broadcast_json(found)

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
            found = self._look(candidate, [stem])
            if isinstance(found, str):
                why = why or f"{found}."
                if or_newest:
                    self._say(candidate, found, "Taking the newest whole one instead")
                continue
            load_weights(model, found[1](stem), self._dist)
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


def _stems(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Mapping[str, Tensor]]:
    # A model that computes in fp16 has fp32 weights to save; its buffers are saved as such.
    weights = {
        name: value.float() if value.dtype == torch.float16 else value for name, value in weights_of(model).items()
    }
    stems: dict[str, Mapping[str, Tensor]] = {"model": weights}
    if optimizer is not None:
        stems["optimizer"] = moments_of(model, optimizer)
    return stems
