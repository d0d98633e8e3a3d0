"""What a training has cost, for its summary: time by what it went on, memory of every rank, energy, use of the GPUs."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.config.checks import strategy_traits
from trainkit.distributed.device import cpus_of_rank, device_name, peak_memory_mb, reserved_memory_mb, visible_cpus
from trainkit.monitor.advice import Place, advice
from trainkit.monitor.hardware import energy_of
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.training.flops import peak_flops
from trainkit.training.parts import Parts


def mfu(parts: Parts, images_per_sec: float | None) -> float | None:
    """Model FLOPs utilisation in percent, over all GPUs; None where the model's FLOPs or the GPU's are not known."""
    device = parts.dist.device
    peak = peak_flops(device_name(device), parts.precision.name)
    if peak is None or parts.flops_per_image is None or images_per_sec is None:
        return None
    takes_all = strategy_traits(parts.config.strategy.name).gpus_per_rank == "all"
    gpus = torch.cuda.device_count() if takes_all else parts.dist.world_size
    return round(100 * parts.flops_per_image * images_per_sec / (gpus * peak), 2)


def costs(parts: Parts, run: RunDir, seconds: dict[str, float], images_per_sec: float | None) -> dict[str, Any]:
    """Every rank calls it.

    Args:
        seconds: of this rank, by the names of `trainkit.training.clock.PARTS`.
    """
    dist, config = parts.dist, parts.config
    memory = dist.gather_json([peak_memory_mb(dist.device), reserved_memory_mb(dist.device)])
    if not dist.is_main:
        return {}
    place = Place(
        world_size=dist.world_size,
        workers=parts.workers,
        cpus=cpus_of_rank(dist.env) or visible_cpus(),
        waits_for_one=bool(read_events(run, "straggler")),
    )
    return {
        "seconds": {name: round(spent, 3) for name, spent in seconds.items()},
        "mfu": mfu(parts, images_per_sec),
        "flops_per_image": parts.flops_per_image,
        "max_memory_mb": memory[0][0],
        "max_memory_mb_of_ranks": [most for most, _ in memory],
        "max_memory_reserved_mb_of_ranks": [most for _, most in memory],
        "energy": energy_of(run),
        "advice": advice(seconds, config, place),
    }
