"""What is in a checkpoint, however many files it has, for tests."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from trainkit.checkpoint import format
from trainkit.checkpoint.tensors import read_tensors


def tensors(folder: Path, stem: str = "model", which: str = "latest") -> dict[str, Tensor]:
    """Of ``latest``, ``best`` or a step in a folder of checkpoints."""
    return read_tensors(folder, format.verified(folder, format.resolve(folder, which)), stem)
