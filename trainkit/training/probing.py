"""The largest micro batch that fits into memory, found by training with some.

What is measured are whole updates as training makes them, of a model that is thrown away afterwards: parameters,
gradients, the optimizer's state and whatever the strategy holds are in it. A sample more takes so much more, so the
next size is foretold from those before, and only one that should fit is tried: with FSDP a rank without memory in the
middle of an exchange would leave the others waiting. All ranks try the same sizes; what counts is the one that needs
most, and the one that has least. DDP's ranks try by themselves, exchanging nothing, before they do so together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.data.base import Batch
from trainkit.data.loader import train_batches
from trainkit.distributed.memory import MemoryGauge
from trainkit.distributed.process_group import Distributed, local_part
from trainkit.errors import RunFailedError
from trainkit.ranks.env import RankEnv
from trainkit.strategies.base import AsItIs, SharesOptimizer
from trainkit.training.oom import is_out_of_memory
from trainkit.training.parts import Parts
from trainkit.training.update import Updater

HEADROOM = 0.1
"""So much of the memory stays free: for what an update may need more than the one before."""
_STRIDE = 4
"""A size is foretold from one at least so many times smaller."""
PASSES = 2
"""Micro batches of an update that is measured: in the second the gradients of the first are there as well."""
_MB = 2**20
_MOST_SKIPPED = 24
"""fp16 halves its scale from 65536 so many times and more; the optimizer has no state before its first update."""


@dataclass(frozen=True)
class Probed:
    """What was found."""

    micro_batch_size: int
    peak_mb: float
    """Of the rank that needs most."""
    room_mb: float
    """Of the rank that has least, all of it."""

    def in_words(self, world_size: int) -> str:
        """A line for the log."""
        ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
        return (
            f"train.micro_batch_size=auto: {self.micro_batch_size} on {ranks}; "
            f"an update takes {self.peak_mb:,.0f} of {self.room_mb:,.0f} MiB."
        )


def probe(parts: Parts, sizes: Sequence[int]) -> Probed:
    """The largest of ``sizes`` (ascending) that fits on every rank.

    Args:
        parts: of no further use afterwards; with `PASSES` micro batches an update, of any size.

    Raises:
        RunFailedError: not even the smallest fits.
    """
    dist, gauge = parts.dist, MemoryGauge(parts.dist, parts.config.train.memory_limit_mb)
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in parts.model.modules())
    sizes = [size for size in sizes if size >= 2] or sizes if norms else sizes  # one sample has no variance
    sample, own = _sample(parts), _without_exchange(parts)
    average = parts.ema  # it is there while the model trains
    trials = _Trials(own, dist, gauge, sample, alone=own is not parts or dist.world_size == 1)
    trials.first(sizes[0])
    gauge.start()
    held, room = trials.held(), min(dist.gather_json(float(gauge.room())))
    budget = room * (1 - HEADROOM)
    size = largest(sizes, trials.peak, budget, held)
    peaks = trials.peaks
    if own is not parts:
        del trials, own  # and with them a second optimizer
        together = _Trials(parts, dist, gauge, sample, alone=False)
        if size:
            together.first(sizes[0])
        while size and together.peak(size) > budget:
            size = max((other for other in sizes if other < size), default=0)
        peaks = {**peaks, **together.peaks}
    if not size:
        raise _too_small(
            sizes[0], f"An update takes {peaks[min(peaks)] / _MB:,.0f} MiB, and a rank has {room / _MB:,.0f}."
        )
    del average
    return Probed(size, round(peaks[size] / _MB, 1), round(room / _MB, 1))


def _too_small(size: int, why: str) -> RunFailedError:
    return RunFailedError(
        f"Not even a micro batch of {size} fits into memory.",
        why=f"{why} A tenth stays free.",
        fix="Use strategy.name=fsdp, smaller images, a smaller model, or ask for more memory.",
        key="train.micro_batch_size",
    )


class _Trials:
    """Updates of one model, and their peaks: those of the rank that needs most."""

    def __init__(self, parts: Parts, dist: Distributed, gauge: MemoryGauge, sample: Batch, *, alone: bool) -> None:
        self._parts, self._dist, self._gauge, self._sample, self._alone = parts, dist, gauge, sample, alone
        self._updater = Updater(parts)
        self.peaks: dict[int, float] = {}

    def first(self, size: int) -> None:
        """Make the optimizer's state, and what libraries allocate once.

        Raises:
            RunFailedError: there is not even memory for that.
        """
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
        """Bytes that are held before there is any sample, gradients included."""
        own = (local_part(item) for item in self._parts.model.parameters() if item.requires_grad)
        return self._agreed(self._gauge.held() + sum(item.numel() * item.element_size() for item in own))

    def peak(self, size: int) -> float:
        """Bytes that an update with micro batches of ``size`` takes; infinite where memory ran out."""
        self._gauge.start()
        try:
            if self._dist.device.type == "cuda":  # on a new size cuDNN tries its ways, in memory that it gives back
                self._update(size)
                self._gauge.start()
            self._update(size)
            peak = float(self._gauge.peak())
        except Exception as error:
            if not self._alone or not is_out_of_memory(error):
                raise
            peak = math.inf
        self.peaks[size] = self._agreed(peak)
        return self.peaks[size]

    def _agreed(self, peak: float) -> float:
        told = self._dist.gather_json(None if math.isinf(peak) else peak)
        return max(math.inf if one is None else one for one in told)

    def _update(self, size: int) -> bool:
        """Whether one was made. The weights stay where they are."""
        batch = Batch(*(part.expand(size, *part.shape[1:]).contiguous() for part in self._sample))
        return self._updater(iter([batch] * PASSES), lr=0.0, seed=0).stepped.skip is None


def largest(sizes: Sequence[int], measure: Callable[[int], float], budget: float, held: float) -> int:
    """The largest of ``sizes`` (ascending) whose peak is within the budget; 0 if none is.

    Never measures a size that should not fit by those before it: from the second on by the line through the last two.

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
    while left := [size for size in sizes if best < size < above]:
        farthest = min(_STRIDE * base, base + (budget - peaks[base]) / max(slope, 1e-9))
        foretold = [size for size in left if size <= farthest]
        if above < math.inf and math.isinf(peaks[int(above)]):
            foretold = foretold[: len(foretold) // 2 + 1]  # by how much it was too large nobody knows
        size = foretold[-1] if foretold else _STRIDE * base
        if size > farthest or size >= above:
            break
        peaks[size] = measure(size)
        if not math.isinf(peaks[size]):
            slope = (peaks[size] - peaks[base]) / (size - base)
        if peaks[size] <= budget:
            base, best = size, size if size in left else best
        else:
            above = size
    return best


def _without_exchange(parts: Parts) -> Parts:
    """The model of this rank alone, where that is whole and its forward pass asks no other rank; else ``parts``."""
    model = parts.model
    if isinstance(parts.strategy, SharesOptimizer) or not isinstance(model, DistributedDataParallel):
        return parts
    if any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        return parts
    dist = Distributed(RankEnv.single(), parts.dist.device)
    config = parts.config.train.model_copy(update={"global_batch_size": PASSES * parts.micro_batch_size})
    return replace(
        parts,
        config=parts.config.model_copy(update={"train": config}),
        dist=dist,
        model=model.module,
        strategy=AsItIs(),
        precision=type(parts.precision)(parts.precision.name, dist),
    )


def _sample(parts: Parts) -> Batch:
    """One sample of the data, as it comes to training."""
    config, dist = parts.config, parts.dist
    loader = train_batches(
        parts.splits,
        seed=config.seed,
        start_step=0,
        stop_step=1,
        global_batch_size=parts.micro_batch_size * dist.world_size,  # of which there is data enough
        micro_batch_size=parts.micro_batch_size,
        rank=dist.rank,
        world_size=dist.world_size,
        workers=0,
        device=dist.device,
        broken=parts.broken,
    )
    with loader as batches:
        return Batch(*(part[:1] for part in next(batches)))
