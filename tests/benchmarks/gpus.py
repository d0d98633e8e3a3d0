"""What the `gpu_` measurements share: whether there is a GPU, what fits into it, and a race against timm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from tests.benchmarks.arms.turns import Job
from tests.benchmarks.measuring import Figure, against
from tests.benchmarks.resident import Told, assert_same_losses, assert_same_pixels, raced
from trainkit.training.timing import flops_per_image, peak_flops

MODELS = {"resnet50": "ResNet-50", "vit_base_patch32_224": "ViT-B/32"}
AS_TIMM = ("train.label_smoothing=0.1", "optim.weight_decay=2e-5")
"""What timm's arm does by default."""
LOSSES = {"fp32": 1e-3, "bf16": 1e-2}
"""By how much the losses of the same updates may differ, relatively."""


def absent(what: str) -> list[Figure]:
    """The row of a measurement that needs a GPU; empty where there is one."""
    return [] if torch.cuda.is_available() else [Figure(what, "", note="not measured: no GPU here")]


def images_that_fit() -> int:
    """So many photographs in a pass that the first GPU holds two arms which train a ResNet-50 with them."""
    gigabytes: float = torch.cuda.get_device_properties(0).total_memory / 2**30
    return next(images for images, least in ((256, 60), (128, 30), (64, 15), (32, 0)) if gigabytes >= least)


def to_timm(
    folder: Path, job: Job, rounds: int, *, what: str, at_least: float, pixels: float = 0.05, headline: str = ""
) -> Figure:
    """The kit's images a second to those of timm's arm, with the share of the GPU's arithmetic that each uses.

    Made-up batches are the same in both, and so must be the losses. Photographs are cut out at random, and must have
    the same mean and deviation.

    Args:
        pixels: how much these may differ.
    """
    jobs = {"timm_train": replace(job, out=str(folder / "timm.json"))}
    jobs["kit"] = replace(job, out=str(folder / "kit.json"), more=(*AS_TIMM, *job.more))

    def check(told: dict[str, Told]) -> None:
        assert_same_pixels(told, pixels if job.data else 1e-5)
        if job.data is None:
            assert_same_losses(told, LOSSES[job.precision])

    seconds = raced(jobs, rounds, check)
    images = job.batch * job.timed

    def rate(value: float) -> str:
        return f"{images / value:,.0f}/s"

    return against(
        seconds, "kit", what=what, at_least=at_least, faster=True, shown=rate, tolerance=0.03, headline=headline,
        note=_mfu(job, {name: images / median(seconds[name]) for name in jobs}),
    )  # fmt: skip


def _mfu(job: Job, rates: dict[str, float]) -> str:
    """In words; empty where nobody knows what the device can do."""
    import timm

    peak = peak_flops(torch.cuda.get_device_name(0), job.precision) if job.device == "cuda" else None
    flops = flops_per_image(timm.create_model(job.model, num_classes=job.num_classes), 3, job.image_size)
    if peak is None or flops is None:
        return ""
    shares = [f"{100 * flops * rates[name] / peak:.1f} %" for name in ("kit", "timm_train")]
    return f"MFU {shares[0]}, against {shares[1]}"
