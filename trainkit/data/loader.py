"""Batches for the loop, in the order of `epoch_order`: decoded and augmented by worker processes, or cut out of memory.

One loader serves a whole run. Its sampler hands epochs and indices to the workers, so that an epoch's end needs no
``set_epoch``, no restart of the workers and no pause; and a run resumed at step ``n`` starts there, without reading
what came before.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import platform
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from trainkit.common.errors import TrainkitError
from trainkit.common.process import granted_cpus
from trainkit.data import draws
from trainkit.data.base import Batch, EvalBatch, Keys, PartSamples, Samples, Splits, Transform, require_tensors
from trainkit.data.decoding import Part
from trainkit.data.losses import BrokenImages, read_whole
from trainkit.data.order import derive_seed, order_of, repeated, share_of, steps_per_epoch
from trainkit.data.photo_transforms import RandomResizedCrop, random_part
from trainkit.data.shards import ShardImages
from trainkit.data.tensors import TensorSamples, TensorTransform
from trainkit.distributed.device import copies_later


def on_gpu(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy each batch to the GPU a step before it is asked for, on a stream of its own, while the GPU computes.

    A batch that lies there already stays, and an error in place of a batch passes as it is.
    """
    stream = torch.Stream(device)

    def to_gpu(item: Tensor) -> Tensor:
        if item.device.type == "cpu" and not item.is_pinned():  # a data set's own, or the loader's
            item = item.pin_memory()
        return item.to(device, non_blocking=True)

    def copied() -> Any:
        batch = next(batches, None)
        with stream:
            return moved(batch, to_gpu)

    def hold(item: Tensor) -> None:
        if item.device.type != "cpu":
            item.record_stream(user)  # or its memory would be given to the next copy while it is still read

    ahead = copied()
    while ahead is not None:
        batch = ahead
        user = torch.accelerator.current_stream(device)
        user.wait_stream(stream)
        moved(batch, hold)
        ahead = copied()
        yield batch


def _each_moved(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield moved(batch, lambda item: item.to(device))


def moved(batch: Any, move: Callable[[Tensor], Any]) -> Any:
    """A batch with its tensors moved, wherever they are in it; what is none stays as it is, as the keys of samples."""
    if isinstance(batch, Batch):
        return Batch(move(batch.images), move(batch.labels), batch.keys)
    if isinstance(batch, Tensor):
        return move(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: moved(item, move) for key, item in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[moved(item, move) for item in batch])
    if isinstance(batch, list | tuple):
        return type(batch)([moved(item, move) for item in batch])
    return batch


BatchT = TypeVar("BatchT")


class Batches(Iterator[BatchT], AbstractContextManager["Batches[BatchT]"]):
    """An iterator over batches that owns its worker processes: ``with train_batches(...) as batches``.

    ``close`` ends the workers, also half way; running to the end closes by itself. Workers outlive stop signals, and
    never outlive the run. Broken images are noted in ``broken``.
    """

    def __init__(self, loader: Any, device: torch.device | None = None, broken: BrokenImages | None = None) -> None:
        with forking():
            iterator: Any = iter(loader)
        self._batches: Iterator[Any] = iterator
        if broken is not None:
            self._batches = _noted(iterator, broken)
        if device is not None and device.type != "cpu":
            move = on_gpu if copies_later(device) else _each_moved
            self._batches = move(self._batches, device)
        self._end = weakref.finalize(self, end_workers, iterator)
        # At exit Python ends and joins its child processes, but ours ignore SIGTERM: it would wait for ever.
        atexit.register(self._end)

    def __next__(self) -> BatchT:
        try:
            batch = next(self._batches)
        except BaseException:  # StopIteration too
            self.close()
            raise
        if isinstance(batch, TrainkitError):
            self.close()
            raise batch
        return batch  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the worker processes; those that hang in a read are killed after a few seconds."""
        self._batches = iter(())  # it holds the last ones
        atexit.unregister(self._end)
        self._end()

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Loading:
    """One rank's part in loading: its place among the ranks, its processes, its device."""

    rank: int = 0
    world_size: int = 1
    workers: int = 0
    device: torch.device | None = None
    """Batches go there; None: they stay on the CPU."""
    broken: BrokenImages = field(default_factory=BrokenImages)
    """Number of broken images that others may stand in for, and the place where they are noted."""

    def batches(self, fetch: _Fetch, keys: Iterable[Keys]) -> Batches[Any]:
        """Batches that ``fetch`` makes of ``keys``, in this rank's loader processes or in this one."""
        return Batches(_loader(fetch, keys, workers=self.workers, device=self.device), self.device, self.broken)

    def plain_batches(self, fetch: object, keys: Iterable[Keys]) -> Batches[Any]:
        """The same of a ``fetch`` that knows no broken images."""
        return Batches(_loader(fetch, keys, workers=self.workers, device=self.device), self.device)


def _train_from_memory(
    samples: TensorSamples, transform: TensorTransform, seed: int, shares: Iterable[tuple[int, Tensor]]
) -> Iterator[Batch]:
    """Augmented batches of ``samples``, on their device.

    Args:
        shares: epochs, and the indices of batches in each, int64 [count, N].
    """
    device = samples.images.device
    for epoch, share in shares:
        keys = draws.keys(seed, epoch, share)
        # Drawn for the whole epoch at once, which costs next to nothing, and goes to the device in one piece.
        drawn = transform.draw(keys).to(device, non_blocking=True)
        indices = (share % len(samples)).to(device, non_blocking=True)  # of copies those of their images
        for one, key, how in zip(indices.unbind(), keys.unbind(), drawn.unbind(), strict=True):
            images = transform.batch(samples.images.index_select(0, one), how)
            yield Batch(images, samples.labels.index_select(0, one), key)


def _eval_from_memory(
    samples: TensorSamples, transform: TensorTransform, starts: Iterable[int], size: int
) -> Iterator[EvalBatch]:
    """Batches of ``size`` that begin at ``starts``; what is missing at the end is filled with the last sample."""
    total = len(samples)
    places = torch.arange(size, device=samples.images.device)
    for start in starts:
        indices = (places + start).clamp_(max=total - 1)
        images = transform.batch(samples.images.index_select(0, indices))
        yield EvalBatch(images, samples.labels.index_select(0, indices), places < total - start)


def train_batches(
    splits: Splits, loading: Loading, *, seed: int, steps: range, global_batch_size: int, micro_batch_size: int,
    repeats: int = 1,
) -> Batches[Batch]:  # fmt: skip
    """Micro batches of one rank for the global ``steps``.

    Each step has ``global_batch_size / (micro_batch_size * world_size)`` of them. A sample's augmentation is keyed by
    (seed, epoch, index). Raises UserError where the training split is smaller than one global batch.

    Args:
        repeats: how often each image is in its global batch, each time augmented by a key of its own.
    """
    train = splits.train
    transform = splits.train_transform
    per_epoch = steps_per_epoch(len(train), global_batch_size)

    def shares() -> Iterator[tuple[int, Tensor]]:
        """Epochs, and the indices of this rank's micro batches in each: int64 [count, micro_batch_size]."""
        step = steps.start
        while step < steps.stop:
            epoch, first = divmod(step, per_epoch)
            end = min(per_epoch, first + steps.stop - step)
            order = repeated(order_of(train, seed, epoch), repeats, global_batch_size)
            order = order[first * global_batch_size : end * global_batch_size]
            yield epoch, share_of(order, micro_batch_size, rank=loading.rank, world_size=loading.world_size)
            step += end - first

    if isinstance(train, TensorSamples) and isinstance(transform, TensorTransform) and not loading.workers:
        return Batches(_train_from_memory(train, transform, seed, shares()), loading.device)

    later = shares()
    first = [*islice(later, 1)]  # before the workers are forked: in memory that they share, it takes twice as long
    keys = _batch_keys(chain(first, later))
    if isinstance(train, ShardImages):
        keys = train.ahead(keys, seed, (steps.stop - 1) // per_epoch)
    return loading.batches(_Fetch(train, transform, loading.broken.most, seed), keys)


def _batch_keys(shares: Iterable[tuple[int, Tensor]]) -> Iterator[Keys]:
    for epoch, share in shares:
        for indices in share.unbind():
            yield epoch, indices.tolist()


def eval_batches(samples: Samples, transform: Transform, loading: Loading, *, batch_size: int) -> Batches[EvalBatch]:
    """Batches of one rank for one pass over ``samples``.

    Every rank yields the same number of batches of the same shape (collectives in the forward pass would wait for ever
    otherwise); over all ranks the mask is True exactly once for each sample that is not broken.
    """
    total = len(samples)
    per_round = batch_size * loading.world_size
    rounds = -(-total // per_round)
    first = loading.rank * batch_size
    starts = range(first, first + rounds * per_round, per_round)
    if isinstance(samples, TensorSamples) and isinstance(transform, TensorTransform) and not loading.workers:
        return Batches(_eval_from_memory(samples, transform, starts, batch_size), loading.device)

    def all_keys() -> Iterator[Keys]:
        for start in starts:
            filled = min(max(start + batch_size - total, 0), batch_size)
            yield filled, [min(position, total - 1) for position in range(start, start + batch_size)]

    keys = all_keys()
    if isinstance(samples, ShardImages):
        keys = samples.ahead(keys, None, 0)
    return loading.batches(_Fetch(samples, transform, loading.broken.most), keys)


@contextmanager
def _random_state(key: int) -> Iterator[None]:
    """Draw from torch's default generator as if seeded with ``key``; afterwards it is as it was.

    transforms.v2 take their random numbers from the default generator and offer no other way. Saving and restoring
    costs 2 us; `torch.random.fork_rng` costs several times that.
    """
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


@dataclass(frozen=True)
class _Fetch:
    """Makes batches in the workers: keys -> a batch, or the error for the user; the broken images that others stand
    in for, file -> why; and files that were waited for, and for how many seconds.

    The error is a value, because torch raises a worker's exception anew, with its traceback as the message.
    """

    samples: Samples
    transform: Transform
    most_broken: int
    seed: int | None = None
    """Seed of training; None evaluates."""

    def __getitems__(
        self, keys: Keys
    ) -> tuple[Batch | EvalBatch | TrainkitError, tuple[dict[str, str], dict[str, float]]]:
        met: dict[str, str] = {}
        try:
            batch = self._eval_batch(*keys, met) if self.seed is None else self._train_batch(self.seed, *keys, met)
        except TrainkitError as error:
            return error, ({}, {})
        waited: dict[str, float] = {}
        if isinstance(self.samples, ShardImages):
            waited = self.samples.take_waited()
        return batch, (met, waited)

    def _train_batch(self, seed: int, epoch: int, indices: list[int], met: dict[str, str]) -> Batch:
        places = torch.tensor(indices)
        transform = self.transform
        keys = draws.keys(seed, epoch, places)
        if isinstance(self.samples, TensorSamples) and isinstance(transform, TensorTransform):
            # All at once takes a fortieth of the time that one by one does.
            places = places % len(self.samples)
            images = transform.batch(self.samples.images.index_select(0, places), transform.draw(keys))
            return Batch(images, self.samples.labels.index_select(0, places), keys)
        items = []
        count = len(self.samples)
        read = self.samples.__getitem__
        if isinstance(self.samples, PartSamples) and isinstance(transform, RandomResizedCrop):
            read = partial(self.samples.read_part, part=Part(random_part, transform.image_size))
            transform = transform.finish
        for index, key in zip(indices, keys, strict=True):
            with _random_state(derive_seed(seed, epoch, index)):  # a data set of the user's own may draw while it reads
                image, label, _ = read_whole(read, count, index % count, self.most_broken, met)
                if isinstance(transform, TensorTransform):  # the very numbers as for a set in memory
                    items.append((transform.batch(image[None], transform.draw(key[None]))[0], label))
                else:
                    items.append((transform(image), label))
        return Batch(*_collated(items), keys)

    def _eval_batch(self, filled: int, indices: list[int], met: dict[str, str]) -> EvalBatch:
        items = []
        counted = []
        count = len(self.samples)
        read = self.samples.__getitem__
        for position, index in enumerate(indices):
            with _random_state(index):
                image, label, is_whole = read_whole(read, count, index, self.most_broken, met)
                items.append((self.transform(image), label))
            counted.append(is_whole and position < len(indices) - filled)
        return EvalBatch(*_collated(items), torch.tensor(counted))


def _collated(items: list[tuple[Tensor, Any]]) -> tuple[Tensor, Tensor]:
    from torch.utils.data import default_collate  # stacks straight into shared memory when it runs in a worker

    require_tensors(items[0][0], None)
    # Channels that lie side by side, as of photos, stay so: stacking them plane by plane takes longer than resizing.
    rows = [image.permute(1, 2, 0) for image, _ in items]
    if all(row.is_contiguous() for row in rows):
        images = default_collate(rows).permute(0, 3, 1, 2)
    else:
        images = default_collate([image for image, _ in items])
    labels = default_collate([label for _, label in items])
    require_tensors(images[0], labels)
    if labels.is_floating_point():
        labels = labels.float()
    return images, labels


def _noted(batches: Iterator[Any], broken: BrokenImages) -> Iterator[Any]:
    """The batches that `_Fetch` made; broken images in them are noted, and what was waited for."""
    for batch, (met, waited) in batches:
        broken.met.update(met)
        broken.waited.update(waited)
        yield batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _loader(dataset: object, keys: Iterable[Keys], *, workers: int, device: torch.device | None) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset,  # type: ignore[arg-type]  # only __getitems__ is ever called, because the sampler makes batches
        batch_sampler=keys,  # type: ignore[arg-type]  # it is iterated once, and never measured
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=device is not None and copies_later(device),
        worker_init_fn=init_worker,
        generator=torch.Generator().manual_seed(0),  # or the loader draws its seed from the run's own random numbers
        multiprocessing_context="fork" if workers and platform.system() == "Linux" else None,
    )


SHUTDOWN_SECONDS = 3.0
"""A worker that is asked to end and takes longer is killed."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def end_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator; those that hang are killed after `SHUTDOWN_SECONDS`."""
    if not hasattr(iterator, "_shutdown_workers"):
        return
    workers = list(iterator._workers)
    # torch waits for one after the other, and then sends the SIGTERM that they ignore. Kill them all at once.
    timer = threading.Timer(SHUTDOWN_SECONDS, lambda: [worker.kill() for worker in workers])
    timer.start()
    try:
        iterator._shutdown_workers()
    except RuntimeError:
        pass  # torch saw a worker die: by our hand
    finally:
        timer.cancel()
    for worker in workers:
        worker.kill()
        worker.join()


def init_worker(worker: int) -> None:
    """Ignore stop signals, which go to every process of the step: the loop still finishes its step with these workers.

    They end when the loop closes them, or when they notice that their parent is gone.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    gc.freeze()
    gc.enable()
    faulthandler.register(signal.SIGUSR1)  # a rank that hangs asks for this


@contextmanager
def forking() -> Iterator[None]:
    """Start processes with stop signals held back, until `init_worker` ignores them; and that free no garbage of this
    one: a process group of gloo's that is freed in a fork waits for ever, for a thread that only its own process has.
    `init_worker` turns collecting on again, for what is made there.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    was_on = gc.isenabled()
    gc.disable()  # no gc.freeze(): to undo it would undo `trainkit.common.process.without_garbage_collection`, too
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of fork in a process with threads. torch forks nevertheless, and so do we: its workers
            # run no code that takes the parent's locks, and starting them anew would import torch in each.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if was_on:
            gc.enable()


def resolve_workers(workers: int | Literal["auto"], splits: Splits, cpus: int | None = None) -> int:
    """``data.workers`` as a number: ``auto`` is none for data in memory, `default_workers` otherwise."""
    if workers == "auto":
        return 0 if splits.in_memory else default_workers(cpus)
    return workers


def default_workers(cpus: int | None = None) -> int:
    """Loader processes for one rank: the CPUs it really has, less one for the rank itself.

    A machine may have 128 cores and the job four of them: the mask of this process and ``SLURM_CPUS_PER_TASK`` say so.

    Args:
        cpus: where several ranks share cores without being bound to some: this rank's part.
    """
    if cpus is None:
        cpus = granted_cpus()
    return min(max(cpus - 1, 0), 16)  # beyond 16 the rank that collects the batches is the bottleneck
