"""Images a second on a GPU, to timm's training.

- Batches given: ResNet-50 and ViT-B/32 at 224 pixels, as they are and compiled, to timm (`arms/timm_train.py`). Both
  arms get the same bytes in the host's memory and bring them to the GPU by their own prefetcher. Their first updates
  must have the same losses.
- Photographs: the same, not compiled, from JPEG files of 500x375, each arm with its own loader and as many processes of
  it. The files are those of `image_files`, under as many names as there are images in all turns. What the models see
  must have the same mean and deviation.

All in bf16 and channels_last. The kit's arm is its command with its records, logs and samples of the hardware
(`arms/kit.py`). A turn begins with as many batches as the loaders can have made while the other arm had its turn; these
are not timed.
"""

import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from tests.benchmarks.arms.turns import Job
from tests.benchmarks.image_files import write_photos
from tests.benchmarks.measuring import Figure, against, fast_folder
from tests.benchmarks.resident import Told, assert_same_losses, assert_same_pixels, raced
from trainkit.data.loader import default_workers
from trainkit.training.clock import flops_per_image, peak_flops

ROUNDS = 5
GIVEN = "images a second on one GPU, batches given, to timm's training"
PHOTOS = "images a second on one GPU, from JPEG files of 500x375, to timm's training"
MODELS = {"resnet50": "ResNet-50", "vit_base_patch32_224": "ViT-B/32"}
AS_TIMM = ("train.label_smoothing=0.1", "optim.weight_decay=2e-5")
"""What timm's arm does by default."""
LOSSES = {"fp32": 1e-3, "bf16": 1e-2}
"""By how much the losses of the same updates may differ, relatively."""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not make the same updates, or give other pixels.
    """
    if not torch.cuda.is_available():
        return [Figure(what, "", note="not measured: no GPU here") for what in (GIVEN, PHOTOS)]
    figures, batch, workers = [], images_that_fit(), default_workers()
    for model, name in MODELS.items():
        for compile in (False, True):
            job = Job(model, 224, 1000, batch, "", compile=compile, settle=5, timed=50)
            what = f"{GIVEN}: {name}, bf16, {'compiled' if compile else 'not compiled'}"
            with TemporaryDirectory() as folder:
                figures.append(to_timm(Path(folder), job, rounds, what=what, at_least=1.1))
    for model, name in MODELS.items():
        what = f"{PHOTOS}: {name}, bf16, {workers} loader processes"
        with TemporaryDirectory(dir=fast_folder(1 << 30)) as folder:
            job = photo_job(Path(folder), model, batch, workers, 40, rounds)
            figures.append(to_timm(Path(folder), job, rounds, what=what, at_least=1.5))
    return figures


def images_that_fit() -> int:
    """So many photographs in a pass that the first GPU holds two arms which train a ResNet-50 with them."""
    gigabytes: float = torch.cuda.get_device_properties(0).total_memory / 2**30
    return next(images for images, least in ((256, 60), (128, 30), (64, 15), (32, 0)) if gigabytes >= least)


def to_timm(folder: Path, job: Job, rounds: int, *, what: str, at_least: float, pixels: float = 0.05) -> Figure:
    """The kit's images a second to those of timm's arm, with the share of the GPU's arithmetic that each uses.

    Args:
        pixels: how much mean and deviation of photographs may differ, which are cut out at random.
    """
    jobs = {"timm_train": replace(job, out=str(folder / "timm.json"))}
    jobs["kit"] = replace(job, out=str(folder / "kit.json"), more=(*AS_TIMM, *job.more))

    def check(told: dict[str, Told]) -> None:
        assert_same_pixels(told, pixels if job.data else 1e-5)
        if job.data is None:
            assert_same_losses(told, LOSSES[job.precision])

    seconds, images = raced(jobs, rounds, check), job.batch * job.timed
    return against(
        seconds, "kit", what=what, at_least=at_least, faster=True, tolerance=0.03, headline=what,
        shown=lambda value: f"{images / value:,.0f}/s",
        note=_mfu(job, {name: images / median(seconds[name]) for name in jobs}),
    )  # fmt: skip


def _mfu(job: Job, rates: dict[str, float]) -> str:
    """In words; empty where nobody knows what the device can do."""
    import timm

    peak = peak_flops(torch.cuda.get_device_name(0), job.precision) if job.device == "cuda" else None
    flops = flops_per_image(timm.create_model(job.model, num_classes=job.num_classes), 3, job.image_size)
    if peak is None or flops is None:
        return ""
    kit, theirs = (f"{100 * flops * rates[name] / peak:.1f} %" for name in ("kit", "timm_train"))
    return f"MFU {kit}, against {theirs}"


def photo_job(folder: Path, model: str, batch: int, workers: int, timed: int, rounds: int) -> Job:
    """What is to be done with photographs, which are written to ``folder``."""
    job = Job(
        model, 224, 2, batch, "", data=str(folder / "photos"), workers=workers, settle=2 * workers + 2, timed=timed,
        more=("data.name=image_folder",),
    )  # fmt: skip
    files = write_photos(folder / "photos")
    for number in range(len(files), batch * (job.warm + 2 * rounds * (job.settle + job.timed) + job.settle)):
        file = files[number % len(files)]
        os.link(file, file.with_name(f"{number:07}.jpg"))
    return job
