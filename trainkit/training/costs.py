"""Costs of a training: time, memory, energy, floating-point operations; and advice that would make it faster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainkit.common.process import visible_cpus
from trainkit.config.checks import less_traffic, strategy_traits
from trainkit.config.schema import Config
from trainkit.distributed.device import cpus_of_rank, device_name, peak_memory_mb, reserved_memory_mb
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import energy_of
from trainkit.training.clock import CHECKPOINT, DATA, END, EVALUATION, EXPOSED, OTHER, PARTS, START, peak_flops

if TYPE_CHECKING:
    from trainkit.training.train_state import TrainState

ENOUGH_SECONDS = 30.0
"""In a shorter run all that is slow at first would weigh too much."""


def advice(
    seconds: Mapping[str, float], config: Config, *, world_size: int, workers: int, cpus: int, straggler: bool = False
) -> str | None:
    """The change of a setting that would save most, and the share of time it is about; None where nothing stands out.

    Args:
        seconds: of rank 0, by `PARTS`.
        workers: loader processes of each rank.
        cpus: of each rank.
        straggler: one was found: waiting for communication is its fault.
    """
    total = 0.0
    for part, spent in seconds.items():
        if part not in (START, END):
            total += spent
    if total < ENOUGH_SECONDS:
        return None
    share = {part: seconds.get(part, 0.0) / total for part in PARTS}
    train = config.train
    saving = config.checkpoint
    rarer = math.ceil(share[CHECKPOINT] / 0.03)
    load = f"more CPUs for each rank, --cpus-per-task {2 * cpus}"
    if workers < cpus - 1:
        load = f"data.workers={min(cpus - 1, max(4, 2 * workers))}"
    exchange = less_traffic(config) or f"train.global_batch_size={2 * train.global_batch_size}"
    if world_size == 1 or straggler:
        exchange = ""
    save = ""
    if saving.every_steps:
        save = f"checkpoint.every_steps={rarer * saving.every_steps}"
    elif saving.every_epochs:
        save = f"checkpoint.every_epochs={rarer * saving.every_epochs}"
    evaluate = f"train.eval_every_epochs={math.ceil(share[EVALUATION] / 0.1) * train.eval_every_epochs}"
    log = ""
    if config.monitor.log_every < 10:
        log = "monitor.log_every=50"
    rows = {  # least share worth a word, that word, and a change
        DATA: (0.2, "data wait", load),
        EXPOSED: (0.2, "waiting for gradients of other ranks", exchange),
        CHECKPOINT: (0.1, "saving", save),
        EVALUATION: (0.3, "validation", evaluate),
        OTHER: (0.2, "records and the loop itself", log),
    }
    best = None
    most = 1.0
    for part, (least, words, change) in rows.items():
        if change and share[part] / least >= most:
            most = share[part] / least
            best = f"{share[part]:.0%} {words}: {change}"
    return best


def mfu(state: TrainState, images_per_sec: float | None) -> float | None:
    """Model FLOPs utilisation in percent, over all GPUs; None where the model's FLOPs or the GPU's are not known."""
    device = state.dist.device
    peak = peak_flops(device_name(device), state.precision.name)
    if peak is None or state.flops_per_image is None or images_per_sec is None:
        return None
    takes_all = strategy_traits(state.config.strategy.name).gpus_per_rank == "all"
    gpus = torch.accelerator.device_count() if takes_all else state.dist.world_size
    return round(100 * state.flops_per_image * images_per_sec / (gpus * peak), 2)


def costs(state: TrainState, run: RunDir, seconds: dict[str, float], images_per_sec: float | None) -> dict[str, Any]:
    """The cost of a training for its summary: time, memory of every rank, energy, use of the GPUs. Every rank calls it.

    Args:
        seconds: of this rank, by `PARTS`.
    """
    dist = state.dist
    memory = dist.gather_json([peak_memory_mb(dist.device), reserved_memory_mb(dist.device)])
    if not dist.is_main:
        return {}
    cpus = cpus_of_rank(dist.env) or visible_cpus()
    straggler = bool(read_events(run, "straggler"))
    place = {"world_size": dist.world_size, "workers": state.workers, "cpus": cpus}
    return {
        "seconds": {name: round(spent, 3) for name, spent in seconds.items()},
        "mfu": mfu(state, images_per_sec),
        "flops_per_image": state.flops_per_image,
        "max_memory_mb": memory[0][0],
        "max_memory_mb_of_ranks": [most for most, _ in memory],
        "max_memory_reserved_mb_of_ranks": [most for _, most in memory],
        "energy": energy_of(run),
        "advice": advice(seconds, state.config, straggler=straggler, **place),
    }
