"""Saving and restoring with all ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import files
from trainkit.checkpoint.finding import Finder
from trainkit.checkpoint.finding import Restored as Restored
from trainkit.checkpoint.record import BrokenCheckpointError
from trainkit.checkpoint.state import load_moments, load_weights, load_where_named, moments_of, weights_of
from trainkit.checkpoint.writing import Checkpointer, Sketch
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError


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
                held = stem in files.described(self._folder, step).stems
        return self._dist.broadcast_json(held)

    def state_of(self, step: int) -> dict[str, Any]:
        """The plain values in the checkpoint of ``step``; none if it is broken."""
        state: dict[str, Any] = {}
        if self._dist.is_main:
            with suppress(BrokenCheckpointError):
                state = dict(files.described(self._folder, step).state)
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
        return self._dist.broadcast_json(files.steps(self._folder)[::-1] if self._dist.is_main else [])

    def _say(self, step: int, fault: str, then: str) -> None:
        if self._dist.is_main:
            checkpoint = files.path_of(self._folder, step)
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
