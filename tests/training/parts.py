"""What trains, in this very process: for tests of what is done with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.rank_functions import QUICK
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load, to_yaml
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import Distributed
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.training.evaluation import EvaluationPass, Measured, evaluate
from trainkit.training.progress import Progress
from trainkit.training.recorder import Instruments, Recorder
from trainkit.training.train_state import TrainState, build

SMALL = (
    "data.name=synthetic", "data.train_size=24", "data.val_size=10", "data.test_size=6", "data.image_size=4",
    "data.num_classes=7", "data.augment=false", "train.global_batch_size=8", "train.micro_batch_size=4",
)  # fmt: skip


def parts_of(*overrides: str, dist: Distributed | None = None, model: nn.Module | None = None) -> TrainState:
    """Of a preset for one process, or as ``dist`` says, with little data: 3 updates an epoch."""
    preset = "single" if dist is None else "ddp"
    config = load(preset, (*QUICK, *SMALL, *overrides)).config
    dist = dist or Distributed(RankEnv.single(), torch.device("cpu"))
    return build(config, dist, build_data(config.data), model=model or Linear())


@dataclass
class Notes:
    """A logger that keeps what it gets."""

    records: list[dict[str, Any]] = field(default_factory=list)

    def log(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))

    def close(self) -> None:
        pass


def keeper_of(
    parts: TrainState,
    folder: Path,
    progress: Progress,
    beat: Callable[[], None] = lambda: None,
    *,
    asynchronous: bool = False,
) -> Recorder:
    """Of a run in ``folder``; its `Notes` are ``keeper.metrics``."""
    run = RunDir.open(folder) if folder.exists() else RunDir.create(folder, to_yaml(parts.config))
    writer = Attempt.begin(run)
    keep = parts.config.checkpoint.keep
    checkpoints = Checkpoints(run.checkpoints, keep=keep, dist=parts.dist, asynchronous=asynchronous)
    return Recorder(parts, writer, checkpoints, Notes(), progress, Instruments(beat))


def evaluated(parts: TrainState, **how: Any) -> dict[str, float]:
    """Metrics of the validation; none if it was told to stop."""
    found = Measured()
    assert evaluate(parts, EvaluationPass(parts.splits.val, **how), found) == bool(found.metrics)
    return found.metrics


class Linear(nn.Module):
    """A small model whose weights are always the same, and that notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(3 * 4 * 4, 7)
        self.layer.weight.data = torch.randn(7, 48, generator=random)
        self.layer.bias.data = torch.randn(7, generator=random)
        self.calls: list[tuple[int, bool, bool]] = []
        """Size of the batch, whether training, whether gradients are kept."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls.append((len(images), self.training, torch.is_grad_enabled()))
        scores: torch.Tensor = self.layer(images.flatten(1))
        return scores


class Formats(nn.Module):
    """Notes the format in which matrices are multiplied; its scores are too fine for half precision's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear().layer
        self.formats: set[torch.dtype] = set()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(images.flatten(1))
        self.formats.add(scores.dtype)
        return scores
