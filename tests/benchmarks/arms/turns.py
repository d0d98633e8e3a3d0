"""What the arms of the `gpu_` measurements have in common: what they are told to do, and when they may.

Each arm is a process of its own that stays, with its model on the device, until it has had all of its turns. It counts
the batches that its loop asks for: some to get warm in, and then a turn after the other, of which each is begun only
when it is told to. The clock runs from when the device has nothing to do to when it has nothing to do again.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.processes import end_with


@dataclass(frozen=True)
class Job:
    """What an arm does; it gets it as JSON."""

    model: str
    image_size: int
    num_classes: int
    batch: int
    """Images of a pass."""
    out: str
    """A file for its report, and the beginning of the names of what else it writes."""
    global_batch: int = 0
    """Images of an update; 0: those of a pass."""
    device: str = "cuda"
    precision: str = "bf16"
    lr: float = 0.002
    """So small that roundings do not drive the losses of two arms apart in the updates in which they are compared."""
    compile: bool = False
    data: str | None = None
    """Folder of the data set; None: the same made-up batches again and again, of which nothing must be read."""
    workers: int = 0
    warm: int = 20
    """Passes before the first turn: whatever is compiled, tuned or allocated is so in these."""
    settle: int = 0
    """Passes at the beginning of each turn that are not timed: loader processes have worked on meanwhile."""
    timed: int = 0
    """Passes of a turn that are."""
    turns: int = 0
    parent: int = 0
    memory_mb: float | None = None
    """So much of the device's memory is all it may have."""
    more: tuple[str, ...] = ()
    """Further settings of the kit's."""


class Over(Exception):
    """All turns have been had."""


class Turns:
    """Asked before each batch.

    Args:
        go, done: what can be read from and written to, a line each.
    """

    def __init__(self, job: Job, go: Callable[[], object], done: Callable[[str], object]) -> None:
        self._job, self._go, self._done, self._began = job, go, done, 0.0

    def before(self, number: int) -> None:
        """Wait for a turn if it is the batch for it, and say how long the last one took. Raises `Over` at the end."""
        job, since = self._job, number - self._job.warm
        if since < 0:
            return
        turn, place = divmod(since, (job.settle + job.timed) or 1)
        if place == 0:
            self._synchronize()
            self._done(repr(time.perf_counter() - self._began) if turn else "ready")
            if turn == job.turns:
                raise Over
            self._go()
        if place == job.settle:
            self._synchronize()
            self._began = time.perf_counter()

    def taken(self, batches: Iterator[Any], look: Callable[[Any], object] = lambda batch: None) -> Iterator[Any]:
        """The endless ``batches``, as far as there are turns for them; ``look`` sees those before the first turn."""
        number = 0
        while True:
            self.before(number)
            batch = next(batches, None)
            assert batch is not None, f"there are {number} batches only"
            if number < self._job.warm:
                look(batch)
            yield batch
            number += 1

    def _synchronize(self) -> None:
        if self._job.device == "cuda":
            torch.cuda.synchronize()


def run(main: Callable[[Job, Turns], int | None]) -> None:
    """Do in this process what `tests.benchmarks.resident` asks of an arm: ``python -m <arm> JOB GO DONE``."""
    job, go, done = Job(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    end_with(job.parent)

    def wait() -> None:
        if not os.read(go, 1):  # a measurement that is gone gives no turns
            raise SystemExit(1)

    raise SystemExit(main(job, Turns(job, wait, lambda line: os.write(done, f"{line}\n".encode()))))


class Report:
    """What an arm has to say of its work: the loss of its updates, and mean and deviation of what its model saw."""

    def __init__(self, job: Job) -> None:
        self._out, self._pixels = job.out, list[Tensor]()
        self.losses: list[float] = []
        """Mean of so many updates as are between two `steps`."""
        self.steps: list[int] = []
        self.gauges: list[Any] = []
        """What measures memory, where that is asked for."""

    def look(self, images: Tensor) -> None:
        """``images``: float [N, 3, H, W], normalised. Few of their pixels are looked at, and nothing is awaited."""
        some = images[:, :, ::16, ::16].float()
        self._pixels.append(torch.stack([some.mean(), some.std()]))

    def write(self, **more: Any) -> None:
        """Into its file, complete or absent."""
        pixels = torch.stack(self._pixels).mean(0).tolist() if self._pixels else []
        with open(f"{self._out}.part", "w") as file:
            json.dump({"losses": self.losses, "steps": self.steps, "pixels": pixels, **more}, file)
        os.replace(f"{self._out}.part", self._out)


def made(job: Job) -> list[tuple[Tensor, Tensor]]:
    """Batches of noise, the same in every arm: uint8 [N, 3, H, W] and int64 [N], in pinned memory for a GPU."""
    random = torch.Generator().manual_seed(0)
    size, found = (job.batch, 3, job.image_size, job.image_size), []
    for _ in range(4):
        images = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
        labels = torch.randint(0, job.num_classes, (job.batch,), generator=random)
        found.append((images.pin_memory(), labels.pin_memory()) if job.device == "cuda" else (images, labels))
    return found


def limit_memory(job: Job) -> None:
    """Have the device's allocator run out of memory at so much as the job may have."""
    if job.device == "cuda" and job.memory_mb is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory_mb * 2**20 / total))
