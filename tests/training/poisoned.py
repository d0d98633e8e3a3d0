"""A data set with white images among its grey ones, and a model that is not a number on white images."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.rank_functions import train_run
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import TrainkitError
from trainkit.common.image_input import DataInfo
from trainkit.data.base import Splits
from trainkit.data.order import global_batch

SIZE, BATCH = 160, 8
PER_EPOCH = SIZE // BATCH
SETTINGS = (
    "data.name=tests.training.poisoned:data",
    "model.name=tests.training.poisoned:model",
    f"train.global_batch_size={BATCH}",
    "schedule.name=cosine",
    "train.epochs=1",
)


class Grey:
    """Images [1, 4, 4], dark or light by their label; those of ``white`` are white."""

    def __init__(self, size: int, white: Iterable[int] = ()) -> None:
        labels = torch.arange(size) % 2
        noise = torch.randint(0, 90, (size, 1, 4, 4), generator=torch.Generator().manual_seed(size))
        self.images = (noise + 100 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
        self.images[list(white)] = 255
        self.labels: list[int] = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


def data(root: Path, *, positions: str = "", val: bool = False) -> Splits:
    """``positions``: the first epoch's global batches with a white image, such as ``3,4``, or ``all``; ``val``: so has
    the validation."""
    listed = range(PER_EPOCH) if positions == "all" else [int(item) for item in positions.split(",") if item]
    white = [
        index for at in listed for index in global_batch(range(SIZE), 0, at, BATCH)[: None if positions == "all" else 1]
    ]
    info = DataInfo("grey", 2, 1, 4, ("dark", "light"), (0.4,), (0.2,))
    return Splits(info, Grey(SIZE, white), Grey(22, [0] if val else []), Grey(10), same, same, in_memory=True)


def same(image: Tensor) -> Tensor:
    return image


class NotANumberOnWhite(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 2))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        white = images.amin(dim=(1, 2, 3)) > 2.5
        return logits + torch.where(white, torch.nan, 0.0)[:, None]


def model(info: DataInfo, *, dropout: float = 0.0) -> nn.Module:
    return NotANumberOnWhite(dropout)


def train_and_tell(
    env: RankEnv,
    folder: Path,
    preset: str,
    settings: tuple[str, ...],
    stop_after: int | None = None,
    all_have: tuple[str, ...] = SETTINGS,
) -> str:
    """How it ended, or what it said."""
    try:
        return train_run(env, folder, preset, (*all_have, *settings), stop_after)
    except TrainkitError as error:
        return f"{error.exit_code}: {error}"
