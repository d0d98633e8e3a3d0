"""Saving and restoring with all ranks; a checkpoint may be written behind training."""

import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from trainkit.checkpoint import format, safetensors_files
from trainkit.checkpoint.alone import Place, Stems, newest_in, stems_of
from trainkit.checkpoint.format import BrokenCheckpointError, CheckpointManifest, FileFacts
from trainkit.checkpoint.safetensors_files import Stored, TensorEntry
from trainkit.checkpoint.state import (
    Held,
    Sent,
    TensorSource,
    load_moments,
    load_weights,
    load_where_named,
    shares_of,
)
from trainkit.common import fileio, terminal
from trainkit.common.errors import DiskError, TrainkitError, UserError
from trainkit.distributed.device import copies_later
from trainkit.distributed.process_group import Distributed

_Files = Mapping[str, Mapping[TensorEntry, Tensor]]
"""File name -> entry -> a rank's part of it."""
_Facts = dict[str, FileFacts]
_T = TypeVar("_T")
_KEPT = 3
"""Checkpoints of a run that trains: a disk may break the newest one."""


def _give_way() -> None:
    """Let threads that train go first where a core has both: the calling thread is in no hurry."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):
            nice = max(os.getpriority(os.PRIO_PROCESS, 0), 10)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


@dataclass(frozen=True)
class Restored:
    """State that was restored besides model and optimizer."""

    step: int
    state: Mapping[str, Any]
    """State as it was given to `Checkpoints.save`, on every rank; a number that was not finite is None."""
    extra: Stems
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
        keep: how many to keep besides the best; None: 3, and after `finish` only the newest.
        may_write: raises TrainkitError when this process no longer writes this run; asked on rank 0, before anything is
            written and again before a checkpoint takes its place.
        asynchronous: `save` returns once it has a copy in memory (one of a rank's own share, kept for the next);
            `go_on` and `settle` raise the save's errors.
        memory: folder of this node's memory, where ranks of the attempt before may have left their last state
            (`save_alone`), on this node or on others; None: none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None,
        dist: Distributed,
        may_write: Callable[[], None] = lambda: None,
        asynchronous: bool = False,
        memory: Path | None = None,
    ) -> None:
        self._folder = folder
        self._memory = memory
        self._keep = keep
        self._dist = dist
        self._may_write = may_write
        self._asynchronous = asynchronous
        self.best: int | None = None
        """Step of the best checkpoint, as of the next save."""
        self.spared: int | None = None
        """Step of one that is kept besides: the best one of a longer run, see `Progress.before_end`."""
        # A process that ends for some other reason waits for it, and leaves a whole checkpoint if it can.
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_give_way if asynchronous else None)
        self._copies: dict[str, dict[TensorEntry, Tensor]] = {}
        self._group: c10d.ProcessGroup | None = None
        self._under_way: _Save | None = None
        self._phase = 0
        self._saved = time.monotonic()

    def seconds_since_save(self) -> float:
        """Age of what is on the disk or on its way there, by this rank's clock; since the start, if nothing is."""
        return 0.0 if self._under_way is not None else time.monotonic() - self._saved

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        step: int,
        state: Mapping[str, Any],
        extra: Stems | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the checkpoint of ``step``, point ``latest`` and ``best``, and delete what is no longer kept.

        Waits for the one before, if that is still on its way.

        Args:
            optimizer: None: its state is not saved.
            state: plain values, for `restore`.
            extra: further tensors. One may be sharded (a DTensor), the same on every rank, or on some ranks only, of
                which the lowest one's counts; every rank names the same stems.
            done: called on every rank, by `go_on` or `settle`, once it is durable.

        Raises:
            RunFailedError: it, or the one before, could not be written (a full disk); on every rank, or the others
                would wait in the next collective.
        """
        self.save_tensors(stems_of(model, optimizer, extra), step=step, state=state, done=done)

    def save_tensors(
        self, stems: Stems, *, step: int, state: Mapping[str, Any], done: Callable[[], None] = lambda: None
    ) -> None:
        """Do what `save` does with any tensors, each stem of them as its ``extra``."""
        self.settle()
        save = _Save(step, state, self.best, done)
        is_main = self._dist.is_main
        self._together(step, lambda: format.begin(self._folder, step, self._may_write) if is_main else None)
        files, writers = shares_of(stems, self._dist)
        alone = writers == {0}
        blind: list[int] = []
        if not alone:
            blind = [rank for rank in self._blind(step) if rank in writers]
        if blind and self._group is None:  # of its own: it goes on behind training, whose collectives must not meet it
            self._group = cast(c10d.ProcessGroup, c10d.new_group(backend="gloo"))
        copied: torch.Event | None = None
        held: _Files = files
        if self._asynchronous:
            copied = self._copy(files)
            held = self._copies

        def write() -> _Facts:
            if copied is not None:
                copied.synchronize()
            facts = self._write(step, held, blind)
            return self._commit(save, facts) if alone else facts

        self._begin(save, write, commits=alone)
        if not self._asynchronous:
            self.settle()

    def over(self) -> int:
        """Count the phases that are over for this rank."""
        return self._phase - (self._under_way is not None and not self._under_way.work.done())

    def go_on(self, over: int) -> None:
        """Go on if ``over`` phases are over for every rank.

        Raises:
            TrainkitError: the checkpoint could not be written; on every rank.
        """
        save = self._under_way
        if save is None or over < self._phase:
            return
        self._under_way = None
        try:
            facts = self._together(save.step, save.work.result)
        except TrainkitError:
            if self._dist.is_main:
                format.abandon(self._folder, save.step)
            raise
        if save.commits:
            self._saved = save.began
            save.done()
            return
        everything: _Facts = {}
        for told in self._dist.gather_json({name: asdict(fact) for name, fact in facts.items()}):
            for name, fact in told.items():
                everything[name] = FileFacts(**fact)
        self._begin(save, lambda: self._commit(save, everything), commits=True)

    def settle(self) -> None:
        """Wait until nothing is on its way; raises as `go_on`."""
        while self._under_way is not None:
            self.go_on(self._phase)

    def close(self) -> None:
        """Wait for what this rank still does, and keep its errors: something else has gone wrong, or all is settled."""
        self._thread.shutdown()

    def _begin(self, save: _Save, work: Callable[[], _Facts], *, commits: bool) -> None:
        self._phase += 1
        self._under_way = save
        save.commits = commits
        save.work = self._thread.submit(work)

    def _together(self, step: int, work: Callable[[], _T]) -> _T:
        """Work at the checkpoint of ``step``; an error of it on one rank is raised on all."""
        what = f"The checkpoint of step {step} could not be written."
        again = terminal.command("resume", self._folder.parent)
        fix = f"Free some space, then `{again}`; the previous checkpoint is complete."
        return self._dist.together(fileio.disk_errors_as(what, fix=fix, kind=DiskError)(work))

    def _blind(self, step: int) -> list[int]:
        """Ranks that do not see the folder in which rank 0 writes: machines need not share a disk."""
        token = format.partial_of(self._folder, step) / f".{self._dist.broadcast_json(secrets.token_hex(8))}"
        if self._dist.is_main:
            with suppress(OSError), format.new_file(token.parent, token.name):
                pass  # if that fails, all send, and rank 0 says what is wrong when it writes
        self._dist.barrier()
        sees = self._dist.gather_json(token.exists())
        if self._dist.is_main:
            token.unlink(missing_ok=True)
        return [rank for rank, seen in enumerate(sees) if not seen]

    def _copy(self, files: _Files) -> torch.Event | None:
        """Copy this rank's share as it is now, on the current stream; returns what a GPU's copy has yet to reach.

        It goes over the copy before, for new memory costs more than the copying. A copy of what is on a GPU is pinned,
        so that the GPU copies.
        """
        before = self._copies
        self._copies = {}
        is_later = False
        for name, named in files.items():
            self._copies[name] = {}
            for entry, value in named.items():
                buffer = before.get(name, {}).get(entry)
                later = copies_later(value.device)
                if buffer is None:
                    buffer = torch.empty(entry.shape, dtype=entry.dtype, pin_memory=later)
                self._copies[name][entry] = buffer.copy_(value, non_blocking=later)
                is_later |= later
        if not is_later:
            return None
        copied = torch.Event()
        copied.record()
        return copied

    def _write(self, step: int, files: _Files, blind: list[int]) -> _Facts:
        """Write this rank's files and, on rank 0, those of the ranks that cannot. Raises OSError."""
        folder = format.partial_of(self._folder, step)
        facts: _Facts = {}
        problem: OSError | None = None
        if self._dist.rank in blind:
            group = cast(c10d.ProcessGroup, self._group)
            for name, named in files.items():
                safetensors_files.send(name.encode(), group)
                facts[name] = safetensors_files.write(
                    lambda part: safetensors_files.send(part, group), named, named.__getitem__
                )
                safetensors_files.send(b"", group)
            safetensors_files.send(b"", group)
            return facts
        try:
            for name, named in files.items():
                with format.new_file(folder, name) as out:
                    facts[name] = safetensors_files.write(out.write, named, named.__getitem__)
        except OSError as error:  # the others send nevertheless
            problem = error
        if self._dist.is_main:
            for rank in blind:
                problem = safetensors_files.write_for(rank, folder, cast(c10d.ProcessGroup, self._group)) or problem
        if problem is not None:
            raise problem
        return facts

    def _commit(self, save: _Save, facts: _Facts) -> _Facts:
        if self._dist.is_main:
            format.commit(self._folder, CheckpointManifest(save.step, save.state, facts), self._may_write)
            if save.best_step is not None and save.best_step in format.steps(self._folder):
                format.point(self._folder, "best", save.best_step)
            format.prune(self._folder, self._keep or _KEPT, spared=self.spared)
        return {}

    def finish(self) -> None:
        """Training is over, and all that it saved is on the disk."""
        if self._keep is None and self._dist.is_main:
            self._may_write()
            with suppress(OSError):
                format.prune(self._folder, 1, spared=self.spared)

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        extra: Sequence[str] = (),
        into: Stems | None = None,
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
        stems = ["model", *extra]
        if optimizer is not None:
            stems.append("optimizer")
        found = self.newest(stems, further=[*(into or {})], extra=extra, accept=accept)
        if found is None:
            return None
        restored, source = found
        load_weights(model, source("model"), self._dist)
        if optimizer is not None:
            load_moments(model, optimizer, source("optimizer"), self._dist)
        for stem, named in (into or {}).items():
            load_where_named(named, source(stem), self._dist)
        return restored

    def newest(
        self,
        stems: Sequence[str] = (),
        *,
        further: Sequence[str] = (),
        extra: Sequence[str] = (),
        accept: Callable[[Restored], object] = lambda _: None,
    ) -> tuple[Restored, Callable[[str], TensorSource]] | None:
        """Return the newest whole checkpoint, and where each stem's tensors come from; None if there is none.

        Every rank asks for the same stems, in the same order, and takes all of each.

        Args:
            stems: must be there; ``further`` may be.
            extra, accept: see `restore`.
        """
        self.settle()
        steps = self._steps()
        left, holder = newest_in(self._memory, self._dist)
        places = [Place(self._folder, step) for step in steps]
        if left > max(steps, default=-1):
            places.insert(0, Place(self._memory or self._folder, left, holder))
        for place in places:
            try:
                return self._look(place, stems, further=further, extra=extra, accept=accept)
            except BrokenCheckpointError as fault:
                self._say(place, fault, "Trying the one before it")
        return None

    def forget_memory(self) -> None:
        """Remove what was left in this node's memory; every rank has restored what it needs of it."""
        if self._memory is not None:
            shutil.rmtree(self._memory.parent, ignore_errors=True)

    def _look(
        self,
        place: Place,
        stems: Sequence[str],
        *,
        further: Sequence[str] = (),
        extra: Sequence[str] = (),
        accept: Callable[[Restored], object] = lambda _: None,
    ) -> tuple[Restored, Callable[[str], TensorSource]]:
        """Look at a checkpoint with all ranks that see its files. Returns what was restored, and where each
        stem's tensors come from (every rank asks for the same). Raises BrokenCheckpointError on every rank.

        Args:
            stems: must be there; ``further`` may be, and rank 0 reads those of ``extra`` at once.
            accept: see `restore`.
        """
        dist = self._dist
        fault: str | None = None
        own: CheckpointManifest | None = None
        record = self._record(place)
        folder = place.folder
        with suppress(BrokenCheckpointError):
            own = format.manifest_of(folder, place.step)
        readers = [rank for rank, sees in enumerate(dist.gather_json(own == record)) if sees]
        wanted = [*stems, *(stem for stem in further if stem in record.stems)]
        stored: dict[str, Stored] = {}
        tensors: dict[str, Mapping[str, Tensor]] = {stem: {} for stem in extra}
        restored = Restored(place.step, record.state, tensors)
        try:
            names: list[str] = []
            for stem in wanted:
                names += record.files_of(stem)
            if dist.rank in readers:
                format.compare(folder, record, names[readers.index(dist.rank) :: len(readers)])
                stored = {stem: Stored(folder, record, stem) for stem in wanted}
            if dist.is_main:
                for stem in extra:
                    tensors[stem] = stored[stem].read_all()
                accept(restored)
        except (BrokenCheckpointError, ValueError, KeyError, TypeError) as error:
            fault = str(error)
        for problem in dist.gather_json(fault):
            if problem is not None:
                raise BrokenCheckpointError(problem)

        def source(stem: str) -> TensorSource:
            if len(readers) == dist.world_size and stem in stored:
                return stored[stem]
            return Sent(stored.get(stem) or Held({}), dist, place.holder)

        return restored, source

    def manifest_of(self, step: int) -> CheckpointManifest:
        """Record of the checkpoint of ``step``; an empty one if it is broken."""
        with suppress(BrokenCheckpointError):
            return self._record(Place(self._folder, step))
        return CheckpointManifest(step, {}, {})

    def _record(self, place: Place) -> CheckpointManifest:
        """A checkpoint's record, as its holder sees it. Raises BrokenCheckpointError on every rank."""
        told = {"record": "", "fault": ""}
        if self._dist.rank == place.holder:
            try:
                told["record"] = format.manifest_of(place.folder, place.step).to_json()
            except BrokenCheckpointError as broken:
                told["fault"] = str(broken)
        told = self._dist.broadcast_json(told, src=place.holder)
        if told["fault"]:
            raise BrokenCheckpointError(told["fault"])
        return format.parse(told["record"].encode(), place.step)

    def load_weights(self, model: nn.Module, step: int, *, or_newest: bool = False, stem: str = "model") -> int:
        """Load only the weights of the checkpoint of ``step``; the step whose weights were loaded.

        Args:
            stem: ``model``, or ``ema``: the averaged ones.
            or_newest: if that one is broken or gone, take the newest whole one and say so on stderr.

        Raises:
            UserError: there is none, or it is that of another model; on every rank.
        """
        self.settle()
        others = [other for other in self._steps() if other != step]
        why = ""
        for candidate in [step, *others]:
            place = Place(self._folder, candidate)
            try:
                _, source = self._look(place, [stem])
            except BrokenCheckpointError as fault:
                why = why or f"{fault}."
                if not or_newest:
                    break
                self._say(place, fault, "Taking the newest complete one instead")
                continue
            load_weights(model, source(stem), self._dist)
            return candidate
        what = f"The checkpoint of step {step} is broken."
        fix = f"Use another: {', '.join(map(str, others)) or 'there is none'}."
        if or_newest:
            what = f"The checkpoint of step {step} is broken, and so are all others."
            fix = "Train again: `python -m jobs.submit` on the run's config.yaml."
        raise UserError(what, why=why, fix=fix)

    def _steps(self) -> list[int]:
        """Steps with a checkpoint, as rank 0 sees them, newest first."""
        return self._dist.broadcast_json(format.steps(self._folder)[::-1] if self._dist.is_main else [])

    def _say(self, place: Place, fault: BrokenCheckpointError, then: str) -> None:
        if self._dist.is_main:
            terminal.warn(f"Checkpoint {format.path_of(place.folder, place.step)} is broken: {fault}. {then}.")
