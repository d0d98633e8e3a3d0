"""Saving and restoring with all ranks: gathering and scattering is collective, files are rank 0's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import files
from trainkit.checkpoint.record import BrokenCheckpointError
from trainkit.checkpoint.state import (
    fill_tensors,
    gather_state_dict,
    gather_tensors,
    scatter_optimizer_state,
    scatter_state_dict,
)
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RunFailedError, TrainkitError, UserError


@dataclass(frozen=True)
class Restored:
    """What was restored besides model and optimizer."""

    step: int
    state: Mapping[str, Any]
    """As it was given to `Checkpoints.save`, on every rank; a number that was not finite is None."""
    extra: Mapping[str, Mapping[str, Tensor]]
    """The extra tensors that were asked for: on rank 0's CPU, empty on the others."""


class Checkpoints:
    """The checkpoints of one run. Every rank calls every method; only rank 0 needs to see the folder.

    Args:
        keep: how many to keep besides the best.
        may_write: raises TrainkitError when this process no longer writes this run; asked on rank 0, before anything is
            written and again before a checkpoint takes its place.
    """

    def __init__(
        self, folder: Path, *, keep: int, dist: Distributed, may_write: Callable[[], None] = lambda: None
    ) -> None:
        self._folder, self._keep, self._dist, self._may_write = folder, keep, dist, may_write
        self._saved = time.monotonic()

    def seconds_since_save(self) -> float:
        """By this rank's clock; since the start, if it has not saved."""
        return time.monotonic() - self._saved

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        step: int,
        state: Mapping[str, Any],
        best_step: int | None,
        extra: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Write the checkpoint of ``step``, point ``latest`` and ``best``, delete what is no longer kept.

        Args:
            optimizer: None: its state is not kept.
            state: plain values, for `restore`.
            extra: file stem -> name -> tensor: what else belongs to it. A tensor may be sharded (a DTensor), the
                same on every rank, or on some ranks only, of which the lowest one's counts; every rank names the same
                stems.

        Raises:
            RunFailedError: it could not be written (a full disk); on every rank, or the others would wait in the next
                collective.
        """
        weights, moments = gather_state_dict(model, optimizer, self._dist)
        tensors = {"model": weights, **({} if optimizer is None else {"optimizer": moments})}
        for stem, named in (extra or {}).items():
            tensors[stem] = gather_tensors(named, self._dist)
        error: TrainkitError | None = None
        if self._dist.is_main:
            try:
                files.write(self._folder, step, tensors, state, self._may_write)
                if best_step is not None and best_step in files.steps(self._folder):
                    files.point(self._folder, "best", best_step)
                files.prune(self._folder, self._keep)
            except OSError as problem:
                error = RunFailedError(
                    f"The checkpoint of step {step} could not be written.",
                    why=f"{problem.strerror}: {problem.filename}.",
                    fix="Make room, then `python -m jobs.resume`; the checkpoint before it is whole.",
                )
            except TrainkitError as refusal:
                error = refusal
        self._dist.raise_together(error)
        self._saved = time.monotonic()

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
        stems = ["model", *([] if optimizer is None else ["optimizer"]), *extra]
        found, tensors = self._newest(stems, extra, tuple(into or ()), accept) if self._dist.is_main else (None, {})
        told: Any = self._dist.broadcast_json(
            None if found is None else {"step": found.step, "state": dict(found.state)}
        )
        if told is None:
            return None
        scatter_state_dict(model, tensors.get("model", {}), self._dist)
        if optimizer is not None:
            scatter_optimizer_state(model, optimizer, tensors.get("optimizer", {}), self._dist)
        for stem, named in (into or {}).items():
            fill_tensors(named, tensors.get(stem, {}), self._dist)
        return found or Restored(int(told["step"]), told["state"], {stem: {} for stem in extra})

    def holds(self, step: int, stem: str) -> bool:
        """Whether the checkpoint of ``step`` says that it has tensors ``stem``; False if it is broken."""
        held = False
        if self._dist.is_main:
            with suppress(BrokenCheckpointError):
                held = f"{stem}.safetensors" in files.verified(self._folder, step, ()).files
        return self._dist.broadcast_json(held)

    def load_weights(self, model: nn.Module, step: int, *, or_newest: bool = False, stem: str = "model") -> int:
        """Load only the weights of the checkpoint of ``step``; the step whose weights were loaded.

        Args:
            stem: ``model``, or ``ema``: the averaged ones.
            or_newest: if that one is broken or gone, take the newest whole one and say so on stderr.

        Raises:
            UserError: there is none, or it is that of another model; on every rank.
        """
        weights: dict[str, Tensor] = {}
        error = None
        if self._dist.is_main:
            try:
                step, weights = self._weights(step, or_newest, stem)
            except TrainkitError as refusal:
                error = refusal
        self._dist.raise_together(error)
        scatter_state_dict(model, weights, self._dist)
        return self._dist.broadcast_json(step)

    def _newest(
        self,
        stems: Sequence[str],
        extra: Sequence[str],
        further: Sequence[str],
        accept: Callable[[Restored], object],
    ) -> tuple[Restored | None, dict[str, dict[str, Tensor]]]:
        for step in reversed(files.steps(self._folder)):
            try:
                record, tensors = files.read(self._folder, step, stems)
                for stem in further:
                    if f"{stem}.safetensors" in record.files:
                        tensors |= files.read(self._folder, step, [stem])[1]
            except BrokenCheckpointError as fault:
                self._say(step, fault, "Trying the one before it")
                continue
            restored = Restored(step, record.state, {stem: tensors[stem] for stem in extra})
            try:
                accept(restored)
            except (ValueError, KeyError, TypeError) as fault:
                self._say(step, fault, "Trying the one before it")
                continue
            return restored, tensors
        return None, {}

    def _weights(self, step: int, or_newest: bool, stem: str) -> tuple[int, dict[str, Tensor]]:
        others = [other for other in reversed(files.steps(self._folder)) if other != step]
        why = ""
        for candidate in [step, *(others if or_newest else [])]:
            try:
                return candidate, files.read(self._folder, candidate, [stem])[1][stem]
            except BrokenCheckpointError as fault:
                why = why or f"{fault}."
                if or_newest:
                    self._say(candidate, fault, "Taking the newest whole one instead")
        raise UserError(
            f"The checkpoint of step {step} is broken{', and so are all others' if or_newest else ''}.",
            why=why,
            fix=f"Use another: {', '.join(map(str, others)) or 'there is none'}."
            if not or_newest
            else "Train again: `python -m jobs.submit` on the run's config.yaml.",
        )

    def _say(self, step: int, fault: Exception, then: str) -> None:
        print(
            f"Checkpoint {files.path_of(self._folder, step)} is broken: {fault}. {then}.", file=sys.stderr, flush=True
        )
