"""Saving and restoring with all ranks: gathering and handing out is collective, files are rank 0's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import files
from trainkit.checkpoint.state import gather, hand_out_model, hand_out_optimizer
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RunFailedError, UserError


class Checkpoints:
    """The checkpoints of one run. Every rank calls every method; only rank 0 needs to see the folder."""

    def __init__(self, folder: Path, *, keep: int, dist: Distributed) -> None:
        self._folder, self._keep, self._dist = folder, keep, dist

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        step: int,
        state: Mapping[str, Any],
        best_step: int | None,
    ) -> None:
        """Write the checkpoint of ``step``, point ``latest`` and ``best``, delete what is no longer kept.

        A failed write (a full disk) is raised on every rank, or the others would wait in the next collective.
        """
        weights, moments = gather(model, optimizer)
        problem = None
        if self._dist.is_main:
            try:
                if not files.rewrite_state(self._folder, step, state):
                    files.write(self._folder, step, {"model": weights, "optimizer": moments}, state)
                if best_step is not None and files.path_of(self._folder, best_step).is_dir():
                    files.point(self._folder, "best", best_step)
                files.prune(self._folder, self._keep)
            except OSError as error:
                problem = f"{error.strerror}: {error.filename}"
        problem = self._dist.broadcast_object(problem)
        if problem is not None:
            raise RunFailedError(
                f"The checkpoint of step {step} could not be written.",
                why=f"{problem}.",
                fix="Make room, then `python -m jobs.resume`; the checkpoint before it is whole.",
            )

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the newest whole checkpoint into model and optimizer; its ``state.json``, or None if there is none.

        Broken ones are passed over, and said so.
        """
        state, weights, moments = self._read_newest() if self._dist.is_main else (None, {}, {})
        state = self._dist.broadcast_object(state)
        if state is None:
            return None
        _check_fit(model, weights, self._dist)
        hand_out_model(model, weights, self._dist)
        hand_out_optimizer(model, optimizer, moments, self._dist)
        return state

    def load_weights(self, model: nn.Module, step: int) -> None:
        """Load only the weights of the checkpoint of ``step``."""
        weights = files.read_tensors(self._folder, step, "model") if self._dist.is_main else {}
        _check_fit(model, weights, self._dist)
        hand_out_model(model, weights, self._dist)

    def _read_newest(self) -> tuple[dict[str, Any] | None, dict[str, Tensor], dict[str, Tensor]]:
        for step in reversed(files.steps(self._folder)):
            try:
                state = files.read_state(self._folder, step)
                weights = files.read_tensors(self._folder, step, "model")
                moments = files.read_tensors(self._folder, step, "optimizer")
            except files.BrokenCheckpointError as error:
                print(
                    f"Checkpoint {files.path_of(self._folder, step)} is broken: {error}. Trying the one before it.",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            return state, weights, moments
        return None, {}, {}


def _check_fit(model: nn.Module, weights: Mapping[str, Tensor], dist: Distributed) -> None:
    """Raise UserError on every rank if rank 0's ``weights`` are those of another model."""
    problem = None
    if dist.is_main:
        # Wrappers put their name in front (`module.`); shapes of shards are those of the whole tensor.
        own = {name.removeprefix("module."): tuple(value.shape) for name, value in model.state_dict().items()}
        for name in own.keys() | weights.keys():
            there = tuple(weights[name].shape) if name in weights else None
            if own.get(name) != there:
                problem = (
                    f"'{name}' is {there or 'absent'} in the checkpoint and {own.get(name) or 'absent'} in the model"
                )
                break
    problem = dist.broadcast_object(problem)
    if problem is not None:
        raise UserError(
            "The checkpoint does not fit the model.",
            why=f"{problem}.",
            fix="Use the configuration that the checkpoint was made with: config.yaml in its run folder.",
        )
