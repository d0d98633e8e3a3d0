"""Batches for the loop: in the order of `order.py`, decoded and augmented by worker processes.

One loader serves a whole run. Its sampler hands ``(epoch, index)`` to the workers, so that an epoch's end needs no
``set_epoch``, no restart of the workers and no pause; and a run resumed at step ``n`` starts there, without reading
what came before.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from trainkit.data.base import Samples, Splits, Transform
from trainkit.data.order import derive_seed, epoch_order, micro_batches, steps_per_epoch
from trainkit.data.workers import Batches as Batches
from trainkit.data.workers import init_worker
from trainkit.errors import TrainkitError

if TYPE_CHECKING:
    from torch import Tensor

    TrainBatch = tuple[Tensor, Tensor]
    EvalBatch = tuple[Tensor, Tensor, Tensor]

Key = tuple[int, int]
"""What the sampler hands to a worker: (epoch, index) in training, (is padding, index) in evaluation."""


def train_batches(
    splits: Splits,
    *,
    seed: int,
    start_step: int,
    stop_step: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    workers: int,
    pin_memory: bool = False,
) -> Batches[TrainBatch]:
    """Micro batches of ``rank`` for global steps ``start_step`` to ``stop_step - 1``.

    Yields images uint8 [micro_batch_size, C, H, W] and labels int64 [micro_batch_size], ``global_batch_size /
    (micro_batch_size * world_size)`` of them for each step. A sample's augmentation is keyed by (seed, epoch, index).
    Raises UserError where the training split is smaller than one global batch.
    """
    per_epoch = steps_per_epoch(len(splits.train), global_batch_size)

    def keys() -> Iterator[list[Key]]:
        epoch, order = -1, None
        for step in range(start_step, stop_step):
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                order = epoch_order(len(splits.train), seed, epoch)
            assert order is not None
            position = step % per_epoch * global_batch_size
            for indices in micro_batches(
                order,
                position,
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
                rank=rank,
                world_size=world_size,
            ):
                yield [(epoch, index) for index in indices.tolist()]

    fetch = _FetchTrain(splits.train, splits.train_transform, seed)
    return Batches(_loader(fetch, keys, workers=workers, pin_memory=pin_memory))


def eval_batches(
    samples: Samples,
    transform: Transform,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    workers: int,
    pin_memory: bool = False,
) -> Batches[EvalBatch]:
    """Batches of ``rank`` for one pass over ``samples``: images, labels, and a mask that is False on padding.

    Every rank yields the same number of batches of the same shape (collectives in the forward pass would wait for ever
    otherwise); over all ranks the mask is True exactly once for each sample.
    """
    total, per_round = len(samples), batch_size * world_size

    def keys() -> Iterator[list[Key]]:
        for start in range(rank * batch_size, rank * batch_size + _round_up(total, per_round), per_round):
            positions = range(start, start + batch_size)
            yield [(0, position) if position < total else (1, total - 1) for position in positions]

    return Batches(_loader(_FetchEval(samples, transform), keys, workers=workers, pin_memory=pin_memory))


def resolve_workers(workers: int | Literal["auto"], splits: Splits, cpus: int | None = None) -> int:
    """``data.workers`` as a number: ``auto`` is none for data in memory, `default_workers` otherwise."""
    if workers == "auto":
        return 0 if splits.in_memory else default_workers(cpus)
    return workers


def default_workers(cpus: int | None = None, *, env: Mapping[str, str] | None = None) -> int:
    """Loader processes for one rank: the CPUs it really has, less one for the rank itself.

    Pass ``cpus`` where several ranks share cores without being bound to some. A machine may have 128 cores and the job
    four of them: the mask of this process and ``SLURM_CPUS_PER_TASK`` say so.
    """
    if cpus is None:
        has_mask = hasattr(os, "sched_getaffinity")  # not on macOS
        cpus = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
        granted = (os.environ if env is None else env).get("SLURM_CPUS_PER_TASK", "")
        if granted.isdigit() and int(granted) > 0:
            cpus = min(cpus, int(granted))
    return min(max(cpus - 1, 0), 16)  # beyond 16 the rank that collects the batches is the bottleneck


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@contextmanager
def _random_state(key: int) -> Iterator[None]:
    """Draw from torch's default generator as if seeded with ``key``; afterwards it is as it was.

    transforms.v2 take their random numbers from the default generator and offer no other way. Saving and restoring
    costs 2 us; `torch.random.fork_rng` would touch every GPU's generator as well.
    """
    import torch

    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class _FetchTrain:
    """Runs in the workers: keys -> a batch, or the error for the user as a value.

    As a value, because torch raises a worker's exception anew with its traceback as the message.
    """

    def __init__(self, samples: Samples, transform: Transform, seed: int) -> None:
        self.samples, self.transform, self.seed = samples, transform, seed

    def __getitems__(self, keys: list[Key]) -> list[tuple[Tensor, int]] | TrainkitError:
        try:
            return [self._one(epoch, index) for epoch, index in keys]
        except TrainkitError as error:
            return error

    def _one(self, epoch: int, index: int) -> tuple[Tensor, int]:
        with _random_state(
            derive_seed(self.seed, epoch, index)
        ):  # a data set of the user's own may draw while it reads
            image, label = self.samples[index]
            return self.transform(image), label


class _FetchEval:
    def __init__(self, samples: Samples, transform: Transform) -> None:
        self.samples, self.transform = samples, transform

    def __getitems__(self, keys: list[Key]) -> list[tuple[Tensor, int, bool]] | TrainkitError:
        try:
            return [self._one(padding, index) for padding, index in keys]
        except TrainkitError as error:
            return error

    def _one(self, padding: int, index: int) -> tuple[Tensor, int, bool]:
        with _random_state(index):
            image, label = self.samples[index]
            return self.transform(image), label, not padding


def _collate(items: list[Any] | TrainkitError) -> Any:
    if isinstance(items, TrainkitError):
        return items
    from torch.utils.data import default_collate  # stacks straight into shared memory when it runs in a worker

    return tuple(default_collate(items))


class _KeyBatches:
    def __init__(self, keys: Callable[[], Iterator[list[Key]]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        return self.keys()


def _loader(dataset: object, keys: Callable[[], Iterator[list[Key]]], *, workers: int, pin_memory: bool) -> Any:
    import torch
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset,  # type: ignore[arg-type]  # only __getitems__ is ever called, because the sampler makes batches
        batch_sampler=_KeyBatches(keys),  # it is iterated, never measured
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin_memory,
        worker_init_fn=init_worker,
        generator=torch.Generator().manual_seed(0),  # or the loader draws its seed from the run's own random numbers
        multiprocessing_context="fork" if workers and platform.system() == "Linux" else None,
    )
