"""How long a run waits for its data before the first batch.

A tree of 100,000 empty files is listed, as one rank does it, and read from what that rank tells the others; and the
first batch is fetched at 90 % of an epoch of 1,281,167 samples that cost nothing. CPU time of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from tests.benchmarks.measuring import Figure, alone, cpu_seconds, fast_folder, loaded
from trainkit.data.base import DataInfo, Splits
from trainkit.data.folders import Files

CLASSES, OF_EACH, SAMPLES, ROUNDS = 100, 1000, 1_281_167, 15


class Nothing:
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return torch.zeros((3, 8, 8), dtype=torch.uint8), index % 2


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table."""
    torch.set_num_threads(1)

    def taken(what: str, work: Callable[[], object], at_most: float | None = None, note: str = "") -> Figure:
        work()
        times = [cpu_seconds(work) * 1e3 for _ in range(rounds)]
        return alone(times, what=what, shown="{:.0f} ms".format, at_most=at_most, note=note)

    with TemporaryDirectory(dir=fast_folder(1 << 30)) as name:
        folder = Path(name)
        for label in range(CLASSES):
            (folder / "train" / f"n{label:08}").mkdir(parents=True)
            for number in range(OF_EACH):
                (folder / "train" / f"n{label:08}" / f"n{label:08}_{number}.JPEG").touch()
        told = Files.walk(folder, ("train",)).to_bytes()
        assert Files.from_bytes(folder, told).to_bytes() == told
        listing = [
            taken("100,000 files listed, by one rank", partial(Files.walk, folder, ("train",))),
            taken(f"and read by another, from {len(told) / 1e6:.1f} MB", partial(Files.from_bytes, folder, told)),
        ]
    samples, info = Nothing(), DataInfo("nothing", 2, 3, 8, ("a", "b"), (0.5,) * 3, (0.5,) * 3)
    splits = Splits(info, samples, samples, samples, lambda image: image, lambda image: image)
    what = "first batch after a resume at 90 % of 1.28 million samples"
    return [
        *listing,
        taken(what, partial(first, splits, 0), at_most=50),
        taken(f"{what}, 2 loader processes", partial(first, splits, 2), at_most=50, note="each is a fork, 10 to 20 ms"),
    ]


def first(splits: Splits, workers: int) -> None:
    """Fetch it, of rank 3 of 8."""
    per_epoch = SAMPLES // 256
    of_rank = {"micro_batch_size": 32, "rank": 3, "world_size": 8, "workers": workers}
    with loaded(splits, per_epoch * 9 // 10, per_epoch * 90, 256, **of_rank) as batches:
        next(batches)
