"""``python -m tests.benchmarks.data_start``: how long a run waits for its data before the first batch.

A tree of 100,000 empty files is listed, as one rank does it, and read from what that rank tells the others; and the
first batch is fetched at 90 % of an epoch of 1,281,167 samples that cost nothing. CPU time of this process, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from trainkit.data.base import DataInfo, Splits
from trainkit.data.loader import train_batches
from trainkit.data.tree import Listing

CLASSES, OF_EACH, SAMPLES, ROUNDS = 100, 1000, 1_281_167, 9


class Nothing:
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return torch.zeros((3, 8, 8), dtype=torch.uint8), index % 2


def main() -> int:
    """Measure and print."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for label in range(CLASSES):
            (folder / "train" / f"n{label:08}").mkdir(parents=True)
            for number in range(OF_EACH):
                (folder / "train" / f"n{label:08}" / f"n{label:08}_{number}.JPEG").touch()
        told = Listing.walk(folder, ("train",)).to_bytes()
        assert Listing.from_bytes(told).to_bytes() == told
        report("100,000 files listed", lambda: Listing.walk(folder, ("train",)))
        report(f"and read from {len(told) / 1e6:.1f} MB of another rank", lambda: Listing.from_bytes(told))
    samples, info = Nothing(), DataInfo("nothing", 2, 3, 8, ("a", "b"), (0.5,) * 3, (0.5,) * 3)
    splits = Splits(info, samples, samples, samples, lambda image: image, lambda image: image)
    for workers in (0, 2):
        report(f"first batch after a resume, {workers} workers", lambda workers=workers: first(splits, workers))  # type: ignore[misc]
    return 0


def first(splits: Splits, workers: int) -> None:
    """Fetch it, of rank 3 of 8."""
    per_epoch = SAMPLES // 256
    found = train_batches(
        splits,
        seed=0,
        start_step=per_epoch * 9 // 10,
        stop_step=per_epoch * 90,
        global_batch_size=256,
        micro_batch_size=32,
        rank=3,
        world_size=8,
        workers=workers,
    )
    with found as batches:
        next(batches)


def report(what: str, work: Callable[[], object]) -> None:
    """Print the median."""
    work()
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append((time.process_time() - began) * 1e3)
    print(f"{what:48} {statistics.median(times):6.1f} ms  ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    raise SystemExit(main())
