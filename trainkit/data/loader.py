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
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from trainkit.data import draws
from trainkit.data.base import Samples, Splits, Transform
from trainkit.data.batch import Batch, EvalBatch
from trainkit.data.broken import Broken, Mended, read_whole
from trainkit.data.memory import eval_from_memory, train_batch, train_from_memory
from trainkit.data.order import derive_seed, epoch_order, share_of, steps_per_epoch
from trainkit.data.tensors import TensorSamples, TensorTransform
from trainkit.data.workers import Batches as Batches
from trainkit.data.workers import init_worker
from trainkit.errors import TrainkitError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Keys = tuple[int, list[int]]
"""What the sampler hands to a worker: in training an epoch and indices; in evaluation how many of the last indices only
fill the batch, and indices."""


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
    device: torch.device | None = None,
    broken: Broken | None = None,
) -> Batches[Batch]:
    """Micro batches of ``rank`` for global steps ``start_step`` to ``stop_step - 1``, on ``device`` (None: CPU).

    There are ``global_batch_size / (micro_batch_size * world_size)`` of them for each step. A sample's augmentation is
    keyed by (seed, epoch, index). Raises UserError where the training split is smaller than one global batch.

    Args:
        broken: how many broken images may be replaced by others, and where they are noted; None: none.
    """
    broken = broken or Broken()
    train, transform = splits.train, splits.train_transform
    per_epoch = steps_per_epoch(len(train), global_batch_size)

    def shares() -> Iterator[tuple[int, Tensor]]:
        """Epochs, and the indices of this rank's micro batches in each: int64 [count, micro_batch_size]."""
        step = start_step
        while step < stop_step:
            epoch, first = divmod(step, per_epoch)
            end = min(per_epoch, first + stop_step - step)
            order = epoch_order(len(train), seed, epoch)[first * global_batch_size : end * global_batch_size]
            yield epoch, share_of(order, micro_batch_size, rank=rank, world_size=world_size)
            step += end - first

    if isinstance(train, TensorSamples) and isinstance(transform, TensorTransform) and not workers:
        return Batches(train_from_memory(train, transform, seed, shares()), device)

    # The first is drawn before the workers are forked: in memory that they share, it takes twice as long.
    walk = shares()
    first_share = [*islice(walk, 1)]

    def keys() -> Iterator[Keys]:
        for epoch, share in chain(first_share, walk):
            for indices in share.unbind():
                yield epoch, indices.tolist()

    fetch = _FetchTrain(train, transform, seed, broken.most)
    return Batches(_loader(fetch, keys, workers=workers, device=device), device, broken)


def eval_batches(
    samples: Samples,
    transform: Transform,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    workers: int,
    device: torch.device | None = None,
    broken: Broken | None = None,
) -> Batches[EvalBatch]:
    """Batches of ``rank`` for one pass over ``samples``, on ``device`` (None: CPU).

    Every rank yields the same number of batches of the same shape (collectives in the forward pass would wait for ever
    otherwise); over all ranks the mask is True exactly once for each sample that is not broken.
    """
    broken = broken or Broken()
    total, per_round = len(samples), batch_size * world_size
    starts = range(rank * batch_size, rank * batch_size + _round_up(total, per_round), per_round)
    if isinstance(samples, TensorSamples) and isinstance(transform, TensorTransform) and not workers:
        return Batches(eval_from_memory(samples, transform, starts, batch_size), device)

    def keys() -> Iterator[Keys]:
        for start in starts:
            filled = min(max(start + batch_size - total, 0), batch_size)
            yield filled, [min(position, total - 1) for position in range(start, start + batch_size)]

    fetch = _FetchEval(samples, transform, broken.most)
    return Batches(_loader(fetch, keys, workers=workers, device=device), device, broken)


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

    def __init__(self, samples: Samples, transform: Transform, seed: int, most_broken: int) -> None:
        self.samples, self.transform, self.seed, self.most_broken = samples, transform, seed, most_broken

    def __getitems__(self, keys: Keys) -> Batch | Mended | TrainkitError:
        import torch

        epoch, indices = keys
        met: dict[str, str] = {}
        drawn_by = draws.keys(self.seed, epoch, torch.tensor(indices))
        try:
            if isinstance(self.samples, TensorSamples) and isinstance(self.transform, TensorTransform):
                return train_batch(self.samples, self.transform, torch.tensor(indices), drawn_by)
            images, labels = _collated(
                [self._one(epoch, index, key, met) for index, key in zip(indices, drawn_by, strict=True)]
            )
        except TrainkitError as error:
            return error
        batch = Batch(images, labels, drawn_by)
        return Mended(batch, met) if met else batch

    def _one(self, epoch: int, index: int, key: Tensor, met: dict[str, str]) -> tuple[Tensor, int]:
        seed = derive_seed(self.seed, epoch, index)
        with _random_state(seed):  # a data set of the user's own may draw while it reads
            image, label, _ = read_whole(self.samples, index, self.most_broken, met)
            if isinstance(self.transform, TensorTransform):  # the very numbers as for a set in memory
                return self.transform.batch(image[None], self.transform.draw(key[None]))[0], label
            return self.transform(image), label


class _FetchEval:
    def __init__(self, samples: Samples, transform: Transform, most_broken: int) -> None:
        self.samples, self.transform, self.most_broken = samples, transform, most_broken

    def __getitems__(self, keys: Keys) -> EvalBatch | Mended | TrainkitError:
        import torch

        filled, indices = keys
        met: dict[str, str] = {}
        whole: list[bool] = []
        try:
            images, labels = _collated([self._one(index, met, whole) for index in indices])
        except TrainkitError as error:
            return error
        mask = torch.tensor(whole) & (torch.arange(len(indices)) < len(indices) - filled)
        batch = EvalBatch(images, labels, mask)
        return Mended(batch, met) if met else batch

    def _one(self, index: int, met: dict[str, str], whole: list[bool]) -> tuple[Tensor, int]:
        with _random_state(index):
            image, label, is_whole = read_whole(self.samples, index, self.most_broken, met)
            whole.append(is_whole)
            return self.transform(image), label


def _collated(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    from torch.utils.data import default_collate  # stacks straight into shared memory when it runs in a worker

    images, labels = default_collate(items)
    return images, labels


def _as_it_is(batch: Any) -> Any:
    return batch


class _KeyBatches:
    def __init__(self, keys: Callable[[], Iterator[Keys]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Keys]:
        return self.keys()


def _loader(dataset: object, keys: Callable[[], Iterator[Keys]], *, workers: int, device: torch.device | None) -> Any:
    import torch
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset,  # type: ignore[arg-type]  # only __getitems__ is ever called, because the sampler makes batches
        batch_sampler=_KeyBatches(keys),  # type: ignore[arg-type]  # it is iterated, never measured
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=device is not None and device.type == "cuda",
        worker_init_fn=init_worker,
        generator=torch.Generator().manual_seed(0),  # or the loader draws its seed from the run's own random numbers
        multiprocessing_context="fork" if workers and platform.system() == "Linux" else None,
    )
