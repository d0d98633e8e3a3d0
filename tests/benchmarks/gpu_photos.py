"""``python -m tests.benchmarks.gpu_photos``: images a second on a GPU to timm's training, from JPEG files in folders.

As `gpu_training`, not compiled, each arm with its own loader and as many processes of it: photographs of 500x375, a
random part of each resized to 224, half of them mirrored. They are those of `image_files`, under as many names as there
are images in all turns. What the models see must have the same mean and deviation in both arms; that they make the same
updates of the same batches, `gpu_training` shows. A turn begins with as many batches as the loaders can have made while
the other arm had its turn, and these are not timed.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.arms.turns import Job
from tests.benchmarks.gpus import MODELS, absent, images_that_fit, to_timm
from tests.benchmarks.measuring import Figure, fast_folder
from trainkit.data.loader import default_workers

ROUNDS, TIMED = 5, 40


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms give other pixels.
    """
    what = "images a second on one GPU, from JPEG files of 500x375, to timm's training"
    if missing := absent(what):
        return missing
    figures = []
    for model, name in MODELS.items():
        words = f"{what}: {name}, bf16, {default_workers()} loader processes"
        with TemporaryDirectory(dir=fast_folder(1 << 30)) as folder:
            job = photo_job(Path(folder), model, images_that_fit(), default_workers(), TIMED, rounds)
            figures.append(to_timm(Path(folder), job, rounds, what=words, at_least=1.5, headline=words))
    return figures


def photo_job(folder: Path, model: str, batch: int, workers: int, timed: int, rounds: int) -> Job:
    """What is to be done, with the photographs for it."""
    job = Job(
        model=model, image_size=224, num_classes=2, batch=batch, out="", data=str(folder / "photos"), workers=workers,
        settle=2 * workers + 2, timed=timed, more=("data.name=image_folder",),
    )  # fmt: skip
    passes = job.warm + 2 * rounds * (job.settle + job.timed) + job.settle
    write_links(folder / "photos", passes * batch)
    return job


def write_links(root: Path, images: int) -> None:
    """The photographs, and further names for them until there are so many in all."""
    from tests.benchmarks.image_files import write_photos

    files = write_photos(root)
    for number in range(len(files), images):
        file = files[number % len(files)]
        os.link(file, file.with_name(f"{number:07}.jpg"))


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "gpu_photos"]))
