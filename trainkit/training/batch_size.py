"""Batch sizes: what is asked for must fit the ranks, the data and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict

import torch

from trainkit.config.checks import check_strategy, micro_batch_sizes
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.data.order import steps_per_epoch
from trainkit.distributed.device import device_name, random_state_kept
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError
from trainkit.run.events import Writer, micro_batch_found
from trainkit.training.parts import Parts
from trainkit.training.probing import PASSES, Probed, probe


def check_batch_sizes(config: Config, world_size: int, splits: Splits) -> None:
    """Refuse a global batch that cannot be split evenly over the ranks, or not as the strategy and the mixing of images
    want it, or that the data cannot fill."""
    size, micro = config.train.global_batch_size, config.train.given_micro_batch_size
    steps_per_epoch(len(splits.train), size)  # refuses data of less than one batch
    one = world_size * (micro or 1)
    if size % one:
        low = size // one * one
        raise UserError(
            f"train.global_batch_size={size} cannot be split evenly over {world_size} ranks"
            + (f" of train.micro_batch_size={micro}." if micro else "."),
            why=f"One pass over all ranks takes a multiple of {one} samples.",
            fix=f"Use train.global_batch_size={f'{low} or ' if low else ''}{low + one}.",
        )
    check_strategy(config, {"grad_accum_steps": size // one if micro else 1})
    share = size // world_size
    if config.augment.mixes and not micro and share % 2:
        raise UserError(
            f"train.global_batch_size={size} gives each of {world_size} ranks {share} images, an odd number.",
            why="augment.mixup_alpha or augment.cutmix_alpha mixes pairs, and both of a pair are on one rank.",
            fix=f"Use train.global_batch_size={world_size * (share + 1)}.",
        )


def settled(config: Config, dist: Distributed, writer: Writer, build: Callable[[Config], Parts]) -> Config:
    """``config`` with `train.micro_batch_size` as a number, where it is ``auto``; found, recorded and said.

    A run that goes on with as many such ranks takes what it has found before: dropout and BatchNorm go by it. All else
    stays as it was: what is tried is a model of its own, and random numbers go on where they were.

    Args:
        build: makes what trains of a configuration.

    Raises:
        RunFailedError: nothing fits.
    """
    train, device = config.train, device_name(dist.device)
    if train.micro_batch_size != "auto":
        return config
    sizes = micro_batch_sizes(train.global_batch_size // dist.world_size, even=config.augment.mixes)
    found = dist.broadcast_json(micro_batch_found(writer.run, dist.world_size, device) if dist.is_main else None)
    if found not in sizes:
        measured = probed(config, dist, build, sizes)
        found = measured.micro_batch_size
        if dist.is_main:
            writer.attempt.remark("probed", world_size=dist.world_size, device=device, **asdict(measured))
            print(measured.in_words(dist.world_size), flush=True)
    return config.model_copy(update={"train": train.model_copy(update={"micro_batch_size": found})})


def probed(config: Config, dist: Distributed, build: Callable[[Config], Parts], sizes: list[int]) -> Probed:
    """The largest micro batch of ``sizes``, ascending, that fits on every rank.

    Raises:
        RunFailedError: not even the smallest does.
    """
    # Compiled for one size after the other it would take minutes, and as it is it hardly needs less memory.
    own = {"micro_batch_size": sizes[0], "global_batch_size": PASSES * sizes[0] * dist.world_size, "compile": "off"}
    small = config.model_copy(update={"train": config.train.model_copy(update=own)})
    with random_state_kept(dist.device):
        found = probe(build(small), sizes)
        gc.collect()
        if dist.device.type == "cuda":
            torch.cuda.empty_cache()
    return found
