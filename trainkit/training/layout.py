"""A plain model made ready for its device: where it lies, in what layout, compiled or not, deterministic or not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.config.checks import strategy_traits
from trainkit.config.schema import Config
from trainkit.fileio import make_own
from trainkit.run import folder as run_folder
from trainkit.strategies.base import repeated_blocks
from trainkit.training.activations import checkpoint_activations

_MIN_BLOCK_PARAMS = 10_000
"""Smaller blocks are not worth a compilation of their own."""


def placed(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """``model`` on ``device``, before it is parallelized.

    Compiled in place, so that names in checkpoints stay those of the plain model. What is sharded has to be contiguous:
    there ``channels_last`` is the images' alone.
    """
    train = config.train
    model = model.to(device)
    if train.channels_last and not strategy_traits(config.strategy.name).sharded:
        settings: dict[str, Any] = {"memory_format": torch.channels_last}  # older stubs do not know the keyword
        model = model.to(**settings)
    checkpoint_activations(model, train.activation_checkpointing)
    for module in {"off": [], "model": [model], "blocks": repeated_blocks(model, _MIN_BLOCK_PARAMS)}[train.compile]:
        module.compile()
    return model


def make_deterministic(asked: bool) -> None:
    """Whether kernels that may give other bits each time are kept out of this process.

    Where they are not, cuDNN tries its ways to convolve on the first images of each size, and takes the quickest.
    """
    torch.backends.cudnn.benchmark = not asked
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it, before its first call
    if torch.are_deterministic_algorithms_enabled() != asked:  # saying so again would import torch's compiler
        torch.use_deterministic_algorithms(asked)


def use_own_compiler_cache() -> None:
    """Keep compiled code where only this user can write, unless TORCHINDUCTOR_CACHE_DIR says where.

    torch keeps it in a folder of /tmp with a predictable name, and runs what it finds there, whoever made that folder.
    """
    if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        own = Path(tempfile.gettempdir(), f"trainkit-{os.geteuid()}")
        folder = own if make_own(own) else run_folder.state_file("cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")
