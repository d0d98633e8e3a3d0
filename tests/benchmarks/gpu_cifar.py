"""``python -m tests.benchmarks.gpu_cifar``: an epoch of CIFAR-10's size on a GPU, to torchvision's pipeline.

A ResNet-18 for 32x32 images, bf16, channels_last, batches of 512, shifted by up to 4 pixels and mirrored. The first arm
is what one writes by hand (`arms/torchvision_cifar.py`), the other the kit's command. Both read the same files, which
are of the official archive's size and format and hold noise. From the same batches both must have the same losses; and
what they make of the files the same mean and deviation.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.arms.turns import Job
from tests.benchmarks.gpus import LOSSES, absent
from tests.benchmarks.measuring import Figure, against, fast_folder
from tests.benchmarks.resident import assert_same_losses, assert_same_pixels, raced
from tests.data.cifar10_files import write_cifar10
from trainkit.data.loader import default_workers

ROUNDS, BATCH = 5, 512


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The line of the table.

    Raises AssertionError where the arms do not make the same updates, or give other pixels.
    """
    what = "seconds an epoch of 45,000 images of 32x32 on one GPU, ResNet-18, bf16, to torchvision's pipeline"
    if missing := absent(what):
        return missing
    with TemporaryDirectory(dir=fast_folder(1 << 30)) as folder:
        return [epochs(Path(folder), cifar_job(BATCH), rounds, 10_000, what=what)]


def cifar_job(batch: int) -> Job:
    """What is to be done, but for the data."""
    workers = default_workers()
    return Job(
        model="tests.benchmarks.arms.torchvision_cifar:network", image_size=32, num_classes=10, batch=batch, out="",
        workers=workers, settle=2 * workers + 2, more=("optim.weight_decay=0",),
    )  # fmt: skip


def epochs(folder: Path, job: Job, rounds: int, per_file: int, *, what: str, pixels: float = 0.05) -> Figure:
    """How many times as fast an epoch is, of nine tenths of five files with so many images each.

    Args:
        pixels: how much mean and deviation of a few may differ.
    """
    write_cifar10(folder, per_file)
    jobs = {name: replace(job, out=str(folder / f"{name}.json")) for name in ("torchvision_cifar", "kit")}
    raced(jobs, 0, partial(assert_same_losses, tolerance=LOSSES[job.precision]))
    own = {"kit": (*job.more, "data.name=cifar10")}
    timed = {
        name: replace(
            one, out=str(folder / f"{name}-files.json"), data=str(folder), more=own.get(name, ()),
            timed=5 * per_file * 9 // 10 // job.batch,
        )
        for name, one in jobs.items()
    }  # fmt: skip
    seconds = raced(timed, rounds, partial(assert_same_pixels, tolerance=pixels))
    return against(seconds, "kit", what=what, faster=True, tolerance=0.03, headline=what)


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "gpu_cifar"]))
