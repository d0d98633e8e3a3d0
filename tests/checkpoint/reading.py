"""Checkpoints for tests: written by one process, and read however many files they have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint import format, safetensors_files
from trainkit.checkpoint.format import CheckpointManifest
from trainkit.checkpoint.safetensors_files import Stored, TensorEntry
from trainkit.cluster.ranks import RankEnv
from trainkit.distributed.process_group import Distributed

DIST = Distributed(RankEnv.single(), torch.device("cpu"))


def tensors(folder: Path, stem: str = "model", which: str = "latest") -> dict[str, Tensor]:
    """Of ``latest``, ``best`` or a step in a folder of checkpoints."""
    return Stored(folder, format.verified(folder, format.resolve(folder, which)), stem).read_all()


def write(folder: Path, step: int, stems: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of ``step``, and point ``latest`` at it."""
    partial, facts = format.begin(folder, step), {}
    for stem, named in stems.items():
        held = {TensorEntry.of(name, value.dtype, value.shape): value for name, value in named.items()}
        with format.new_file(partial, f"{stem}.safetensors") as out:
            facts[f"{stem}.safetensors"] = safetensors_files.write(out.write, held, held.__getitem__)
    format.commit(folder, CheckpointManifest(step, state, facts))
    return format.path_of(folder, step)


def flip(file: Path) -> None:
    """Change a bit of its last byte."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
