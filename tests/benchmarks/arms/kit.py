"""The kit's own command, `python -m jobs.train`, with all that a user gets by default, and a stopwatch at its batches.

Batches come from its own loader; those that are made up come as they are, in the host's memory, and go to the device by
its own prefetcher. Nothing is validated or saved: neither do the other arms.

    python -m tests.benchmarks.arms.kit JOB GO DONE
"""

import os
import sys
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from unittest import mock

import torch

from jobs import train
from tests.benchmarks.arms.turns import Job, Over, Report, Turns, limit_memory, made, run
from trainkit.common.errors import TrainkitError
from trainkit.common.image_input import DataInfo
from trainkit.data.base import Batch, Splits, normalize
from trainkit.data.loader import Loading, on_gpu, train_batches
from trainkit.data.photo_transforms import PHOTO_MEAN, PHOTO_STD
from trainkit.distributed.device import MemoryGauge
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

EPOCH = 1_281_167


class Same:
    """So many images as ImageNet has, all alike: of `made` batches only their number is asked for."""

    def __init__(self, image_size: int) -> None:
        self.image = torch.zeros(3, image_size, image_size, dtype=torch.uint8)

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int, /):
        return self.image, 0


def data(root: Path, *, image_size: int, num_classes: int) -> Splits:
    """Of photographs' mean and deviation."""
    names = tuple(map(str, range(num_classes)))
    info = DataInfo("made", num_classes, 3, image_size, names, PHOTO_MEAN, PHOTO_STD)
    return Splits(info, Same(image_size), Same(image_size), Same(image_size), same, same, in_memory=True)


def same(image):
    return image


def main(job: Job, turns: Turns) -> int:
    folder, report = Path(f"{job.out}.run"), Report(job)
    own = partial(timed, job, turns, report)
    limit_memory(job)
    with mock.patch("trainkit.training.train_state.train_batches", own):
        try:
            train.main(["single", "--run-dir", str(folder), *settings(job)], os.environ)
            raise AssertionError("it ended by itself")
        except Over:
            pass
        except TrainkitError as error:
            print(error, file=sys.stderr, flush=True)
            return error.exit_code
    records = read_metrics(RunDir(folder), "train")
    report.losses, report.steps = [record["loss"] for record in records], [record["step"] for record in records]
    report.write(memory_mb=[gauge.peak() / 2**20 for gauge in report.gauges])
    return 0


def settings(job: Job) -> list[str]:
    """As far as the arms have anything in common."""
    where = [
        "data.name=tests.benchmarks.arms.kit:data", f"data.image_size={job.image_size}",
        f"data.num_classes={job.num_classes}",
    ] if job.data is None else [
        f"data.root={job.data}", f"data.workers={job.workers}", f"data.image_size={job.image_size}"
    ]  # fmt: skip
    return [
        f"model.name={job.model}", *where,
        f"launch.gpus_per_node={int(job.device == 'cuda')}",
        f"train.precision={job.precision}", "train.channels_last=true",
        f"train.compile={'model' if job.compile else 'off'}",
        f"train.global_batch_size={job.global_batch or job.batch}",
        "train.epochs=1000", "train.eval_every_epochs=1000",
        "checkpoint.every_epochs=null", "checkpoint.every_minutes=null",
        "optim.name=sgd", f"optim.lr={job.lr}", "optim.momentum=0.9", "optim.nesterov=true",
        "schedule.name=constant", "schedule.warmup_epochs=0",
        *job.more,
    ]  # fmt: skip


@contextmanager
def timed(job: Job, turns: Turns, report: Report, splits: Splits, loading: Loading, **options):
    """In the place of the loop's `train_batches`."""

    device = loading.device
    if job.memory_mb is not None:
        report.gauges.append(MemoryGauge(device, 1))

    def look(batch: Batch) -> None:
        report.look(normalize(batch.images, splits.info))

    sampled = options["steps"].stop == 1  # by `train.micro_batch_size=auto`, before there are turns
    if job.data is not None:
        with train_batches(splits, loading, **options) as batches:
            yield batches if sampled else turns.taken(batches, look)
        return
    again = cycle(Batch(images, labels, torch.arange(job.batch)) for images, labels in made(job))
    again = on_gpu(again, device) if device.type == "cuda" else again
    yield again if sampled else turns.taken(again, look)


if __name__ == "__main__":
    run(main)
