"""Batches that fit: the ranks, the data and memory; the largest micro batch, and advice when memory runs out.

``train.micro_batch_size=auto`` trains whole updates of a model that is thrown away afterwards: parameters, gradients,
the optimizer's state and whatever the strategy holds are in what is measured. Each further sample takes as much, so the
next size is predicted from those before, and only one that should fit is tried: with FSDP a rank that runs out of
memory in the middle of an exchange would leave the others waiting. All ranks try the same sizes; what counts is the one
that needs most, and the one that has least. DDP's ranks first try alone, without an exchange, and then together.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.cluster.ranks import RankEnv
from trainkit.common import terminal
from trainkit.common.accelerators import OUT_OF_MEMORY
from trainkit.common.errors import RunFailedError, TrainkitError, UserError
from trainkit.config.checks import check_split, micro_batch_sizes, smaller, strategy_traits
from trainkit.config.schema import Config
from trainkit.data.base import Batch, Splits
from trainkit.data.order import steps_per_epoch
from trainkit.distributed.device import MemoryGauge, device_name, forget_peak, random_kept
from trainkit.distributed.process_group import Distributed, local_part
from trainkit.distributed.strategies.base import AsItIs, SharesOptimizer
from trainkit.monitor.profiler import out_of_gpu_memory
from trainkit.run.events import Attempt
from trainkit.run.history import micro_batch_found
from trainkit.training.train_state import TrainState
from trainkit.training.update import Updater

_HEADROOM = 0.1
"""Share of the memory that stays free, for an update that needs more than the one before."""
_STRIDE = 4
"""A size is predicted from one that is at most this many times smaller."""
_PASSES = 2
"""Micro batches of a measured update: in the second the gradients of the first are there as well."""
_MB = 2**20
_MOST_SKIPPED = 24
"""Updates that fp16 may skip at first: it halves its scale from 65536, and the optimizer has no state before its first
update."""
_OUT_OF_MEMORY = (*OUT_OF_MEMORY, "can't allocate memory", "std::bad_alloc")


def check_batch_sizes(config: Config, world_size: int, splits: Splits) -> None:
    """Refuse a global batch that cannot be split evenly over the ranks, or not as the strategy and the mixing of images
    require, or that the data cannot fill."""
    size = config.train.global_batch_size
    steps_per_epoch(len(splits.train), size)  # refuses data of less than one batch
    check_split(config, world_size)
    share = size // world_size
    if config.augment.mixes and not config.train.given_micro_batch_size and share % 2:
        raise UserError(
            f"train.global_batch_size={size} gives each of {world_size} ranks {share} images, an odd number.",
            why="augment.mixup_alpha or augment.cutmix_alpha mixes pairs, and both of a pair are on one rank.",
            fix=f"Use train.global_batch_size={world_size * (share + 1)}.",
        )


def resolve_micro_batch_size(
    config: Config, dist: Distributed, writer: Attempt, build: Callable[[Config], TrainState]
) -> Config:
    """``config`` with `train.micro_batch_size` as a number, where it is ``auto``; found, recorded and printed.

    A run that goes on with as many such ranks takes the size that it found before: dropout and BatchNorm depend on it.
    Models and random numbers of the caller stay as they were.

    Args:
        build: makes a model, and what trains it, of a configuration.

    Raises:
        RunFailedError: nothing fits.
    """
    if config.train.micro_batch_size != "auto":
        return config
    device = device_name(dist.device)
    sizes = micro_batch_sizes(config.train.global_batch_size // dist.world_size, even=config.augment.mixes)
    found = None
    if dist.is_main:
        found = micro_batch_found(writer.run, dist.world_size, device)
    found = dist.broadcast_json(found)
    if found not in sizes:
        measured = probed(config, dist, build, sizes)
        found = measured.micro_batch_size
        if dist.is_main:
            writer.remark("probed", world_size=dist.world_size, device=device, **asdict(measured))
            ranks = terminal.plural(dist.world_size, "rank")
            takes = f"an update takes {measured.peak_mb:,.0f} of {measured.room_mb:,.0f} MiB"
            terminal.say(f"train.micro_batch_size=auto: {found} on {ranks}; {takes}.")
    return _with(config, micro_batch_size=found)


def _with(config: Config, **train: Any) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def probed(config: Config, dist: Distributed, build: Callable[[Config], TrainState], sizes: list[int]) -> Probed:
    """The largest micro batch of ``sizes``, ascending, that fits on every rank.

    Raises:
        RunFailedError: not even the smallest does.
    """
    # Compiling for each size would take minutes, and a compiled model hardly needs less memory.
    size = sizes[0]
    small = _with(config, micro_batch_size=size, global_batch_size=_PASSES * size * dist.world_size, compile="off")
    with random_kept(dist.device):
        found = probe(build(small), sizes)
    forget_peak(dist.device)  # or the run would tell that of the trials for its own
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is too small; torch has a type for the GPU's allocator only."""
    words = any(each in str(error) for each in _OUT_OF_MEMORY)
    return words or isinstance(error, MemoryError) or out_of_gpu_memory(error)


@contextmanager
def explain_out_of_memory(config: Config, dist: Distributed) -> Iterator[None]:
    """Re-raise an out-of-memory error of the body with advice.

    Raises:
        RunFailedError: instead of torch's error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, TrainkitError) or not is_out_of_memory(error):
            raise
        train = config.train
        share = train.global_batch_size // dist.world_size
        micro = train.micro_batch_size if isinstance(train.micro_batch_size, int) else share
        half = smaller(micro, share, even=config.augment.mixes)
        memory = "memory"
        advice: list[str] = []
        if half:
            advice.append(f"train.micro_batch_size={half} (the result stays the same) or auto")
        if not strategy_traits(config.strategy.name).sharded:
            advice.append("strategy.name=fsdp")
        if train.activation_checkpointing != "full":
            advice.append("train.activation_checkpointing=full (for models of blocks)")
        if dist.device.type == "cpu":
            advice.append("more memory for the job (--mem)")
        else:
            memory = "GPU memory"
        what = f"Rank {dist.rank} on {socket.gethostname()} ran out of {memory} with micro batches of {micro}."
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunFailedError(what, why=why, fix=f"Use {', or '.join(advice)}.") from error


@dataclass(frozen=True)
class Probed:
    """The largest micro batch, and the memory of an update with it."""

    micro_batch_size: int
    peak_mb: float
    """Memory of the rank that needs most."""
    room_mb: float
    """All memory of the rank that has least."""


def probe(state: TrainState, sizes: Sequence[int]) -> Probed:
    """The largest of ``sizes`` (ascending) that fits on every rank.

    Args:
        state: of no further use afterwards; an update of it has `_PASSES` micro batches of any size.

    Raises:
        RunFailedError: not even the smallest fits.
    """
    dist = state.dist
    gauge = MemoryGauge(state.dist.device, state.dist.env.local_world_size, state.config.train.memory_limit_mb)
    if len(sizes) > 1 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in state.model.modules()):
        sizes = [size for size in sizes if size >= 2]  # one sample has no variance
    sample = _sample(state)
    own = _without_exchange(state)
    _ = state.ema  # which is there while the model trains
    trials = _Trials(own, dist, gauge, sample, sizes[0])
    gauge.start()
    room = min(dist.gather_json(float(gauge.room())))
    budget = room * (1 - _HEADROOM)
    size = largest(sizes, trials.peak, budget, trials.held())
    peaks = trials.peaks
    if own is not state and size:
        del trials, own  # and with them a second optimizer
        together = _Trials(state, dist, gauge, sample, sizes[0])
        while size and together.peak(size) > budget:
            at = sizes.index(size)
            size = sizes[at - 1] if at else 0
        peaks |= together.peaks
    if not size:
        takes = peaks[min(peaks)] / _MB
        has = room / _MB
        raise _too_small(sizes[0], f"An update takes {takes:,.0f} MiB, and a rank has {has:,.0f}.")
    return Probed(size, round(peaks[size] / _MB, 1), round(room / _MB, 1))


def memory_told(state: TrainState) -> str:
    """Say what this rank holds for its training, and what one image adds, on any device.

    Activations are counted as autograd keeps them for the backward pass. Kernels' workspaces and the fragments of an
    allocator come on top.
    """
    parameters = list(state.model.parameters())
    kept: list[torch.Tensor] = []
    for named in state.optimizer.state.values():
        kept += [local_part(item) for item in named.values() if isinstance(item, torch.Tensor)]
    held = {
        "weights": list(map(local_part, parameters)),
        "gradients": [local_part(parameter) for parameter in parameters if parameter.requires_grad],
        f"state of {state.config.optim.name}": kept,
    }
    if state.ema is not None:
        held["averaged weights"] = list(state.ema.tensors().values())
    total = 0.0
    words: list[str] = []
    for name, items in held.items():
        size = sum(item.nbytes for item in items) / _MB
        total += size
        words.append(f"{name} {size:,.1f} MiB")
    told = f"Memory of a rank: {', '.join(words)}"
    if state.config.train.activation_checkpointing != "none":
        return f"{told}; activations are computed again."
    sample = _sample(state)
    few = _activations(state, sample, 2) / _MB
    each = (_activations(state, sample, 4) / _MB - few) / 2
    rest = total + few - 2 * each
    whole = state.config.train.global_batch_size // state.dist.world_size
    at_once = [
        f"{rest + each * count:,.0f} MiB with {count} at a time" for count in sorted({state.micro_batch_size, whole})
    ]
    return f"{told}, activations {each:,.1f} MiB an image: {', '.join(at_once)}."


def _activations(state: TrainState, sample: Batch, count: int) -> int:
    """Bytes that a forward pass of ``count`` images keeps for the backward pass, without the weights."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = local_part(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = _repeated(sample, count)
    images = state.normalized(batch.images)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), state.precision.autocast():
        output = state.model(images)
        loss = state.task.loss(output.float(), batch.labels, "mean")  # which holds what is counted until here
    for item in (*state.model.parameters(), *state.model.buffers()):
        kept.pop(local_part(item).untyped_storage().data_ptr(), None)
    del loss
    return sum(kept.values())


def _too_small(size: int, why: str) -> RunFailedError:
    return RunFailedError(
        f"Not even a micro batch of {size} fits into memory.",
        why=f"{why} A tenth stays free.",
        fix="Use strategy.name=fsdp, smaller images, a smaller model, or request more memory.",
        key="train.micro_batch_size",
    )


class _Trials:
    """Updates of one model, and their peaks: those of the rank that needs most.

    Raises RunFailedError where there is no memory even for micro batches of ``size``.
    """

    def __init__(self, state: TrainState, dist: Distributed, gauge: MemoryGauge, sample: Batch, size: int) -> None:
        self._state = state
        self._dist = dist
        self._gauge = gauge
        self._sample = sample
        self._alone = state.dist.world_size == 1  # no other rank waits for this one's update
        self._updater = Updater(state)
        self.peaks: dict[int, float] = {}
        # Make the optimizer's state, and have libraries allocate what they allocate once.
        error = None
        try:
            for _ in range(_MOST_SKIPPED):
                if self._update(size):
                    break
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
            error = _too_small(size, f"{str(problem).splitlines()[0]}.")
        if self._alone:
            self._dist.raise_together(error)
        elif error is not None:
            raise error

    def held(self) -> float:
        """Bytes held before there is any sample, gradients included."""
        held = self._gauge.held()
        for parameter in self._state.model.parameters():
            if parameter.requires_grad:
                held += local_part(parameter).nbytes
        return max(self._dist.gather_json(held))

    def peak(self, size: int) -> float:
        """Bytes that an update with micro batches of ``size`` takes; infinite where memory ran out."""
        self._gauge.start()
        try:
            if self._dist.device.type != "cpu":  # on a new size cuDNN tries its ways, in memory that it gives back
                self._update(size)
                self._gauge.start()
            self._update(size)
            peak = float(self._gauge.peak())
        except Exception as error:
            if not self._alone or not is_out_of_memory(error):
                raise
            peak = math.inf
        self.peaks[size] = max(self._dist.gather_json(peak))
        return self.peaks[size]

    def _update(self, size: int) -> bool:
        """Make an update that leaves the weights as they are; whether it was not skipped."""
        batch = _repeated(self._sample, size)
        return self._updater(iter([batch] * _PASSES), lr=0.0, seed=0).stepped.skip is None


def largest(sizes: Sequence[int], measure: Callable[[int], float], budget: float, held: float) -> int:
    """The largest of ``sizes`` (ascending) whose peak is within the budget; 0 if none is.

    Never measures a size that by those before it should not fit: from the second on, by the line through the last two.

    Args:
        measure: the peak at a size; infinite where memory ran out.
        held: bytes held before there is any sample.
    """
    peaks = {sizes[0]: measure(sizes[0])}
    if peaks[sizes[0]] > budget:
        return 0
    best = base = sizes[0]
    slope = (peaks[base] - held) / base
    above = math.inf
    while True:
        left = [size for size in sizes if best < size < above]
        if not left:
            return best
        farthest = min(_STRIDE * base, base + (budget - peaks[base]) / max(slope, 1e-9))
        predicted = [size for size in left if size <= farthest]
        if above < math.inf and math.isinf(peaks[int(above)]):
            predicted = predicted[: len(predicted) // 2 + 1]  # nobody knows by how much it was too large
        size = predicted[-1] if predicted else _STRIDE * base
        if size > farthest or size >= above:
            return best
        peaks[size] = measure(size)
        if not math.isinf(peaks[size]):
            slope = (peaks[size] - peaks[base]) / (size - base)
        if peaks[size] <= budget:
            base = size
            if size in left:
                best = size
        else:
            above = size


def _without_exchange(state: TrainState) -> TrainState:
    """The model of this rank alone, where that is whole and its forward pass asks no other rank; else ``state``."""
    model = state.model
    if isinstance(state.strategy, SharesOptimizer) or not isinstance(model, DistributedDataParallel):
        return state
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return state
    dist = Distributed(RankEnv.single(), state.dist.device)
    return replace(
        state,
        config=_with(state.config, global_batch_size=_PASSES * state.micro_batch_size),
        dist=dist,
        model=model.module,
        strategy=AsItIs(),
        precision=type(state.precision)(state.precision.name, dist),
    )


def _sample(state: TrainState) -> Batch:
    """One sample of the data as training gets it."""
    size = state.micro_batch_size * state.dist.world_size  # for which there is data enough
    with replace(state, config=_with(state.config, global_batch_size=size)).batches(0, 1, workers=0) as batches:
        images, labels, keys = next(batches)
        return Batch(images[:1], labels[:1], keys[:1])


def _repeated(sample: Batch, count: int) -> Batch:
    """A batch of ``count`` times the same sample."""
    return Batch(*(part.expand(count, *part.shape[1:]).contiguous() for part in sample))
