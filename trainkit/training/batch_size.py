"""Batch sizes: what is asked for must fit the ranks and the data."""

from __future__ import annotations

from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.data.order import steps_per_epoch
from trainkit.errors import UserError


def check_batch_sizes(config: Config, world_size: int, splits: Splits) -> None:
    """Refuse a global batch that cannot be split evenly over the ranks, or that the data cannot fill."""
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
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
    share = size // world_size
    if config.augment.mixes and not micro and share % 2:
        raise UserError(
            f"train.global_batch_size={size} gives each of {world_size} ranks {share} images, an odd number.",
            why="augment.mixup_alpha or augment.cutmix_alpha mixes pairs, and both of a pair are on one rank.",
            fix=f"Use train.global_batch_size={world_size * (share + 1)}.",
        )
