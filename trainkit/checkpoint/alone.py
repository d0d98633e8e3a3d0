"""Checkpoints that one rank writes alone, into its node's memory, when others are no more; and that all find again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import format, safetensors_files
from trainkit.checkpoint.format import CheckpointManifest, FileFacts
from trainkit.checkpoint.safetensors_files import TensorEntry
from trainkit.checkpoint.state import moments_of, weights_of
from trainkit.common import fileio
from trainkit.distributed.process_group import Distributed

Stems = Mapping[str, Mapping[str, Tensor]]
"""File stem -> name -> tensor."""


@dataclass(frozen=True)
class Place:
    """A checkpoint and where it is."""

    folder: Path
    step: int
    holder: int = 0
    """Rank whose word counts, and who sends what others do not see."""


def stems_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Stems | None = None) -> Stems:
    """Collect the tensors of a checkpoint: file stem -> name -> tensor, where it lies. Arguments as of
    `Checkpoints.save`."""
    # A model that computes in fp16 has fp32 weights to save; its buffers are saved as such.
    weights = weights_of(model)
    for name, value in weights.items():
        if value.dtype == torch.float16:
            weights[name] = value.float()
    stems: dict[str, Mapping[str, Tensor]] = {"model": weights, **(extra or {})}
    if optimizer is not None:
        stems["optimizer"] = moments_of(model, optimizer)
    return stems


def save_alone(folder: Path, stems: Stems, *, step: int, state: Mapping[str, Any]) -> None:
    """Write a checkpoint of tensors that this rank has as a whole, without the others, who may be no more.

    Raises:
        FileExistsError: another rank writes that of this step, or has.
        OSError: it cannot be written.
    """
    partial = format.partial_of(folder, step)
    fileio.make_folder(partial, folder.parent)
    facts: dict[str, FileFacts] = {}
    try:
        for stem, named in stems.items():
            tensors = {TensorEntry.of(name, value.dtype, value.shape): value.detach() for name, value in named.items()}
            name = format.file_name(stem, 0, 1)
            with format.new_file(partial, name) as out:
                facts[name] = safetensors_files.write(out.write, tensors, tensors.__getitem__)
        format.commit(folder, CheckpointManifest(step, state, facts))
    except FileExistsError:
        raise
    except OSError:
        format.abandon(folder, step)
        raise


def newest_in(memory: Path | None, dist: Distributed) -> tuple[int, int]:
    """Return the newest step that any rank finds in the memory of its node, and the lowest rank that does; -1 for the
    step where there is none. A folder that others can write to is passed over: its name is no secret."""
    own: list[int] = []
    if memory is not None and fileio.is_own(memory.parent, private=True):
        own = format.steps(memory)
    told = dist.gather_json(max(own, default=-1))
    newest = max(told)
    return newest, told.index(newest)
