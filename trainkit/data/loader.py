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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.data import base as data_order
from trainkit.data.base import Batch, DataInfo, EvalBatch, Keys, Samples, Splits, Transform, derive_seed
from trainkit.data.folders import BrokenImages, ImageFiles, read_whole
from trainkit.data.packs import Pack
from trainkit.data.shards import ShardImages
from trainkit.distributed.device import copies_later, free_memory
from trainkit.errors import TrainkitError
from trainkit.process import granted_cpus


def on_gpu(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy each batch to the GPU a step before it is asked for, on a stream of its own, while the GPU computes.

    A batch that lies there already stays, and an error in place of a batch passes as it is.
    """
    stream = torch.Stream(device)

    def pinned(item: Tensor) -> Tensor:
        is_in_memory = item.device.type == "cpu" and not item.is_pinned()  # a data set's own, or the loader's
        return item.pin_memory() if is_in_memory else item

    def copied() -> Any:
        batch = next(batches, None)
        with stream:
            return _moved(batch, lambda item: pinned(item).to(device, non_blocking=True))

    ahead = copied()
    while ahead is not None:
        batch = ahead
        user = torch.accelerator.current_stream(device)
        user.wait_stream(stream)
        if isinstance(batch, Batch | EvalBatch):
            for item in batch:
                if item.device.type != "cpu":
                    item.record_stream(user)  # or its memory would be given to the next copy while it is still read
        ahead = copied()
        yield batch


def _each_moved(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield _moved(batch, lambda item: item.to(device))


def _moved(batch: Any, move: Callable[[Tensor], Any]) -> Any:
    """A batch with its tensors moved; what is no batch stays as it is."""
    if isinstance(batch, Batch):
        return Batch(move(batch.images), move(batch.labels), batch.keys)
    return EvalBatch(*map(move, batch)) if isinstance(batch, EvalBatch) else batch


BatchT = TypeVar("BatchT")

SHUTDOWN_SECONDS = 3.0
"""A worker that is asked to end and takes longer is killed."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Batches(Iterator[BatchT], AbstractContextManager["Batches[BatchT]"]):
    """An iterator over batches that owns its worker processes: ``with train_batches(...) as batches``.

    ``close`` ends the workers, also half way; running to the end closes by itself. Workers outlive stop signals, and
    never outlive the run. Broken images are noted in ``broken``.
    """

    def __init__(self, loader: Any, device: torch.device | None = None, broken: BrokenImages | None = None) -> None:
        with _forking():
            iterator: Any = iter(loader)
        self._batches: Iterator[Any] = iterator if broken is None else _noted(iterator, broken)
        if device is not None and device.type != "cpu":
            move = on_gpu if copies_later(device) else _each_moved
            self._batches = move(self._batches, device)
        self._end = weakref.finalize(self, _end_workers, iterator)
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


def _end_workers(iterator: Any) -> None:
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
def _forking() -> Iterator[None]:
    """Start processes with stop signals held back, until `init_worker` ignores them; and that free no garbage of this
    one: a process group of gloo's that is freed in a fork waits for ever, for a thread that only its own process has.
    `init_worker` turns collecting on again, for what is made there.
    """
    before, was_on = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), gc.isenabled()
    gc.disable()  # no gc.freeze(): to undo it would undo `trainkit.process.without_garbage_collection`, too
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


class TensorSamples:
    """Images uint8 [N, C, H, W] and labels on one device: int64 [N], float32 [N], or uint8 [N, classes]."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        assert len(images) == len(labels)
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        label = self.labels[index]
        return self.images[index], label if label.dim() else label.item()


@dataclass(frozen=True)
class TensorTransform:
    """Raw images of one size -> [in_chans, image_size, image_size]: padded by ``shift`` pixels, with black or, by
    ``reflect``, their mirror image, cropped at a random place, mirrored at random if ``flip``, and then resized.

    The pixels are those of torchvision's RandomCrop(size, shift, padding_mode=...) and RandomHorizontalFlip. A batch at
    a time it takes some 3 us for an image of CIFAR-10, image by image 40.
    """

    image_size: int
    shift: int = 0
    flip: bool = False
    reflect: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        """One image [C, H, W]; random numbers come from torch's default generator."""
        return self.batch(image[None], self.draw(torch.randint(1 << 62, (1,))))[0]

    def draw(self, keys: Tensor) -> Tensor:
        """Row and column in the padded image, and 1 to mirror it: int64 [..., 3] for keys [...]."""
        places = 2 * self.shift + 1
        mirror = data_order.below(keys, data_order.SHIFT + 2, 2) if self.flip else torch.zeros_like(keys)
        return torch.stack([*(data_order.below(keys, data_order.SHIFT + n, places) for n in (0, 1)), mirror], dim=-1)

    def batch(self, images: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Images [N, C, H, W] with what `draw` drew for them, int64 [N, 3] on the same device; None: as they are."""
        if drawn is not None and (self.shift or self.flip):
            images = self._cropped(images, drawn)
        return resized(images, self.image_size)

    def _cropped(self, images: Tensor, drawn: Tensor) -> Tensor:
        shift = self.shift
        count, channels, height, width = images.shape
        tall, wide = height + 2 * shift, width + 2 * shift
        padded = images.new_zeros((1 + self.flip, count, channels, tall, wide))
        if self.reflect:
            rows, columns = (_reflected(size, shift, images.device) for size in (height, width))
            padded[0] = images[:, :, rows][..., columns]
        else:
            padded[0, ..., shift : shift + height, shift : shift + width] = images
        if self.flip:
            padded[1] = padded[0].flip(-1)
        top, left, mirror = drawn.unbind(1)
        # The mirror image of a window is a window of the mirror image, counted from its other side.
        left = torch.where(mirror.bool(), 2 * shift - left, left)
        # Each row of each window is a run of bytes: one gather of runs, where indexing would go byte by byte.
        image = torch.arange(count * channels, device=images.device).view(count, channels, 1) * tall
        row = (top + mirror * (count * channels * tall)).view(-1, 1, 1) + torch.arange(height, device=images.device)
        first = (image + row) * wide + left.view(-1, 1, 1)
        runs = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
        return runs.index_select(0, first.view(-1)).view(count, channels, height, width)


def _reflected(size: int, shift: int, device: torch.device) -> Tensor:
    """Which of ``size`` pixels is seen from -shift to size + shift - 1, with a mirror at the first and the last."""
    return size - 1 - (size - 1 - torch.arange(-shift, size + shift, device=device).abs()).abs()


def resized(images: Tensor, image_size: int) -> Tensor:
    """uint8 [N, C, H, W] -> [N, C, image_size, image_size], bilinear."""
    size = (image_size, image_size)
    if images.shape[-2:] == size:
        return images
    if images.device.type == "cpu":  # its kernel for bytes is the fast one, and rounds as an image viewer does
        return F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
    exact = F.interpolate(images.float(), size=size, mode="bilinear", align_corners=False, antialias=True)
    return exact.round_().clamp_(0, 255).to(torch.uint8)  # within one level of the above


def tensor_splits(
    info: DataInfo, parts: Iterable[Samples], *, augment: bool, shift: int, flip: bool = True, in_memory: bool = True,
    reflect: bool = False,
) -> Splits:  # fmt: skip
    """A data set of small images of one size: shifted and mirrored at their own size for training, then resized.

    Args:
        parts: train, val and test.
    """
    plain = TensorTransform(info.image_size)
    augmented = TensorTransform(info.image_size, shift, flip, reflect) if augment else plain
    train, val, test = parts
    return Splits(info, train, val, test, augmented, plain, in_memory)


def mapped(splits: Splits) -> Splits:
    """Use the mapped pixels of a pack as tensors, if all images are pixels of one size: nothing is read or decoded.

    They are augmented in whole batches then, and may move to the GPU. Only for a data set that augments images of one
    size: photos are cut out each in another size.
    """
    parts: list[TensorSamples] = []
    for samples in (splits.train, splits.val, splits.test):
        if isinstance(samples, ImageFiles) and isinstance(samples.files, Pack) and samples.in_chans == 3:
            images, first, end = samples.files.stacked, samples.positions[0], samples.positions[0] + len(samples)
            if images is not None and samples.positions.tolist() == [*range(first, end)]:
                parts.append(TensorSamples(images[first:end], torch.tensor(samples.labels.tolist())))
    if len(parts) < 3 or not isinstance(splits.train_transform, TensorTransform):
        return splits
    train, val, test = parts
    return replace(splits, train=train, val=val, test=test, in_memory=True)


SHARE_OF_FREE = 0.1
"""Of a GPU's free memory, what the data may take: the model and its activations need the rest."""


def to_device(splits: Splits, where: Literal["auto", "cpu"], device: torch.device, *, workers: int) -> Splits:
    """Move ``splits`` to the GPU that trains, if they are in memory and take little of what it has free (`auto`).

    Bytes are cut out alike wherever they lie. Only resizing rounds otherwise on a GPU, by one level of 255 at most.
    """
    if where == "cpu" or device.type == "cpu" or workers:  # a loader process has no GPU
        return splits
    parts = [part for part in (splits.train, splits.val, splits.test) if isinstance(part, TensorSamples)]
    if len(parts) < 3:
        return splits
    if sum(part.images.nbytes + part.labels.nbytes for part in parts) > free_memory(device) * SHARE_OF_FREE:
        return splits
    train, val, test = (TensorSamples(part.images.to(device), part.labels.to(device)) for part in parts)
    return replace(splits, train=train, val=val, test=test)


def _train_from_memory(
    samples: TensorSamples, transform: TensorTransform, seed: int, shares: Iterable[tuple[int, Tensor]]
) -> Iterator[Batch]:
    """Augmented batches of ``samples``, on their device.

    Args:
        shares: epochs, and the indices of batches in each, int64 [count, N].
    """
    device = samples.images.device
    for epoch, share in shares:
        keys = data_order.keys(seed, epoch, share)
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
    total, device = len(samples), samples.images.device
    places = torch.arange(size, device=device)
    for start in starts:
        indices = (places + start).clamp_(max=total - 1)
        images = transform.batch(samples.images.index_select(0, indices))
        yield EvalBatch(images, samples.labels.index_select(0, indices), places < total - start)


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
    broken: BrokenImages | None = None,
    repeats: int = 1,
) -> Batches[Batch]:
    """Micro batches of ``rank`` for global steps ``start_step`` to ``stop_step - 1``, on ``device`` (None: CPU).

    Each step has ``global_batch_size / (micro_batch_size * world_size)`` of them. A sample's augmentation is keyed by
    (seed, epoch, index). Raises UserError where the training split is smaller than one global batch.

    Args:
        broken: how many broken images may be replaced by others, and where they are noted; None: none may be.
        repeats: how often each image is in its global batch, each time augmented by a key of its own.
    """
    broken = broken or BrokenImages()
    train, transform = splits.train, splits.train_transform
    per_epoch = data_order.steps_per_epoch(len(train), global_batch_size)

    def shares() -> Iterator[tuple[int, Tensor]]:
        """Epochs, and the indices of this rank's micro batches in each: int64 [count, micro_batch_size]."""
        step = start_step
        while step < stop_step:
            epoch, first = divmod(step, per_epoch)
            end = min(per_epoch, first + stop_step - step)
            order = data_order.repeated(data_order.order_of(train, seed, epoch), repeats, global_batch_size)
            order = order[first * global_batch_size : end * global_batch_size]
            yield epoch, data_order.share_of(order, micro_batch_size, rank=rank, world_size=world_size)
            step += end - first

    if isinstance(train, TensorSamples) and isinstance(transform, TensorTransform) and not workers:
        return Batches(_train_from_memory(train, transform, seed, shares()), device)

    later = shares()
    first = [*islice(later, 1)]  # before the workers are forked: in memory that they share, it takes twice as long
    keys = ((epoch, indices.tolist()) for epoch, share in chain(first, later) for indices in share.unbind())
    told = train.ahead(keys, seed, (stop_step - 1) // per_epoch) if isinstance(train, ShardImages) else keys
    fetch = _Fetch(train, transform, broken.most, seed)
    return Batches(_loader(fetch, told, workers=workers, device=device), device, broken)


def eval_batches(
    samples: Samples,
    transform: Transform,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    workers: int,
    device: torch.device | None = None,
    broken: BrokenImages | None = None,
) -> Batches[EvalBatch]:
    """Batches of ``rank`` for one pass over ``samples``, on ``device`` (None: CPU).

    Every rank yields the same number of batches of the same shape (collectives in the forward pass would wait for ever
    otherwise); over all ranks the mask is True exactly once for each sample that is not broken.
    """
    broken = broken or BrokenImages()
    total, per_round = len(samples), batch_size * world_size
    rounds = -(-total // per_round)
    starts = range(rank * batch_size, rank * batch_size + rounds * per_round, per_round)
    if isinstance(samples, TensorSamples) and isinstance(transform, TensorTransform) and not workers:
        return Batches(_eval_from_memory(samples, transform, starts, batch_size), device)

    def keys() -> Iterator[Keys]:
        for start in starts:
            filled = min(max(start + batch_size - total, 0), batch_size)
            yield filled, [min(position, total - 1) for position in range(start, start + batch_size)]

    told = samples.ahead(keys(), None, 0) if isinstance(samples, ShardImages) else keys()
    fetch = _Fetch(samples, transform, broken.most)
    return Batches(_loader(fetch, told, workers=workers, device=device), device, broken)


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


class _Fetch:
    """Makes batches in the workers: keys -> a batch, or the error for the user; the broken images that others stand
    in for, file -> why; and files that were waited for, and for how many seconds.

    The error is a value, because torch raises a worker's exception anew, with its traceback as the message.
    """

    def __init__(self, samples: Samples, transform: Transform, most_broken: int, seed: int | None = None) -> None:
        """``seed``: of training; None evaluates."""
        self.samples, self.transform, self.most_broken, self.seed = samples, transform, most_broken, seed

    def __getitems__(
        self, keys: Keys
    ) -> tuple[Batch | EvalBatch | TrainkitError, tuple[dict[str, str], dict[str, float]]]:
        met: dict[str, str] = {}
        try:
            batch = self._eval_batch(*keys, met) if self.seed is None else self._train_batch(self.seed, *keys, met)
        except TrainkitError as error:
            return error, ({}, {})
        waited = self.samples.take_waited() if isinstance(self.samples, ShardImages) else {}
        return batch, (met, waited)

    def _train_batch(self, seed: int, epoch: int, indices: list[int], met: dict[str, str]) -> Batch:
        places, transform = torch.tensor(indices), self.transform
        keys = data_order.keys(seed, epoch, places)
        if isinstance(self.samples, TensorSamples) and isinstance(transform, TensorTransform):
            # All at once takes a fortieth of the time that one by one does.
            places = places % len(self.samples)
            images = transform.batch(self.samples.images.index_select(0, places), transform.draw(keys))
            return Batch(images, self.samples.labels.index_select(0, places), keys)
        items = []
        for index, key in zip(indices, keys, strict=True):
            with _random_state(derive_seed(seed, epoch, index)):  # a data set of the user's own may draw while it reads
                image, label, _ = read_whole(self.samples, index % len(self.samples), self.most_broken, met)
                if isinstance(transform, TensorTransform):  # the very numbers as for a set in memory
                    items.append((transform.batch(image[None], transform.draw(key[None]))[0], label))
                else:
                    items.append((transform(image), label))
        return Batch(*_collated(items), keys)

    def _eval_batch(self, filled: int, indices: list[int], met: dict[str, str]) -> EvalBatch:
        items, counted = [], []
        for position, index in enumerate(indices):
            with _random_state(index):
                image, label, is_whole = read_whole(self.samples, index, self.most_broken, met)
                items.append((self.transform(image), label))
            counted.append(is_whole and position < len(indices) - filled)
        return EvalBatch(*_collated(items), torch.tensor(counted))


def _collated(items: list[tuple[Tensor, Any]]) -> tuple[Tensor, Tensor]:
    from torch.utils.data import default_collate  # stacks straight into shared memory when it runs in a worker

    images, labels = default_collate(items)
    return images, labels.float() if labels.is_floating_point() else labels


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
