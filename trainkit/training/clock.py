"""Step clock: what the time of a run goes to, by the clock of the device; slow ranks; FLOPs of a model and a device."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from trainkit.config import yaml

if TYPE_CHECKING:
    from trainkit.training.progress import Progress


PARTS = (
    "start", "data", "copy", "forward", "backward", "exposed", "optimizer", "checkpoint", "evaluation", "other", "end",
)  # fmt: skip
START, DATA, COPY, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER, END = PARTS

OWN = (DATA, COPY, FORWARD, BACKWARD, OPTIMIZER)
"""The parts that a rank does without waiting for others."""
TRAINING = (*OWN, EXPOSED, OTHER)
"""The parts of training steps."""

_MOST_PENDING = 4096
_IMAGES = 2
SLOWER = 1.5
"""Times as long as the others' median that a straggler's own part takes, at least."""
COST = 0.1
"""The share of the time by which the others could be faster, at least."""
WINDOW_SECONDS = 15.0
WINDOWS = 4
"""Windows in a row, of `WINDOW_SECONDS` each, in which both must hold."""


class Clock:
    """Time by Python's own clock: right where the computation is over when Python goes on.

    Args:
        began: when ``start`` began, by `time.perf_counter`; None: now.
    """

    def __init__(self, began: float | None = None) -> None:
        self.steps = 0
        """Updates since the last lap: the loop counts them."""
        self.part = START
        """The part that time is spent on now."""
        self.at_first_update: Callable[[], None] = lambda: None
        """Called when the first one is made."""
        self._waiting = START  # until the first batch is there
        self._since = began or time.perf_counter()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._lap = dict.fromkeys(PARTS, 0.0)

    def to(self, part: str) -> None:
        """Count the time from here on to ``part``."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        self.part = part
        self._since = now

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the time of the body to ``part``."""
        before = self.part
        self.to(part)
        yield
        self.to(before)

    def wait(self) -> None:
        """Count the time from here on to waiting for a batch."""
        self.to(self._waiting)

    def step(self) -> None:
        """Count an update."""
        self.steps += 1
        if self._waiting == START:
            self.at_first_update()
        self._waiting = DATA

    def watch_backward(self, loss: Tensor) -> None:
        """Have the backward pass of ``loss`` say when all of this rank's own gradients are there.

        torch calls back at the end of a pass, in the order of asking. DDP and FSDP, which then wait for the other
        ranks, ask when gradients come; this asks before there are any.
        """
        loss.register_hook(lambda gradient: Variable._execution_engine.queue_callback(lambda: self.to(EXPOSED)))

    def own(self) -> float:
        """Seconds since the last lap that this rank has not waited for others, as far as they are counted."""
        return sum(self._lap[part] + self._seconds[part] for part in OWN)

    def settle(self, spent: Progress) -> None:
        """Add to ``spent`` the time since the last call."""
        self.to(self.part)
        self._read()
        for part, seconds in self._seconds.items():
            self._lap[part] += seconds
            spent.seconds[part] = spent.seconds.get(part, 0.0) + seconds
        spent.train_seconds += sum(self._seconds[part] for part in TRAINING)
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def lap(self, spent: Progress) -> Lap:
        """`settle`, and the time since the last lap."""
        self.settle(spent)
        lap = Lap(self._lap, self.steps)
        self._lap = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        return lap

    def _read(self) -> None: ...


class StreamClock(Clock):
    """Time by events in the GPU's current stream. All of this needs the device to be current."""

    def __init__(self, began: float | None = None) -> None:
        super().__init__(began)
        super().to(START)  # until here it is the host's time
        self._marks: list[tuple[str, torch.Event]] = []  # part, and where it begins
        self.to(START)

    def to(self, part: str) -> None:
        event = torch.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))
        self.part = part
        if len(self._marks) >= _MOST_PENDING:
            self._take(sum(mark.query() for _, mark in self._marks))

    def _read(self) -> None:
        self._marks[-1][1].synchronize()
        self._take(len(self._marks))

    def _take(self, done: int) -> None:
        """Add up the first ``done`` marks, which the device has passed; the last of them begins the next part."""
        for (part, begin), (_, end) in pairwise(self._marks[:done]):
            self._seconds[part] += begin.elapsed_time(end) / 1000
        self._marks = self._marks[max(done - 1, 0) :]


class Lap(NamedTuple):
    """The time between two records."""

    seconds: dict[str, float]
    """Seconds by part."""
    steps: int

    @property
    def training(self) -> float:
        """Seconds in training steps, validation and saving excluded."""
        return sum(self.seconds[part] for part in TRAINING)

    @property
    def own(self) -> float:
        """Seconds in training steps without waiting for other ranks."""
        return sum(self.seconds[part] for part in OWN)

    def fields(self, *, ranks: int) -> Mapping[str, float | None]:
        """Seconds of each part, for a record; ``exposed`` is null where one rank trains alone."""
        told: dict[str, float | None] = {}
        for part, seconds in self.seconds.items():
            if seconds or part not in (START, END):
                told[f"seconds_{part}"] = round(seconds, 4)
        if ranks == 1:
            told[f"seconds_{EXPOSED}"] = None
        return told


def clock_since(began: float, device: torch.device) -> Clock:
    """The clock of what a device does from ``began`` on, by `time.perf_counter`."""
    if device.type == "cpu":
        return Clock(began)
    return StreamClock(began)


def clock_of(device: torch.device) -> Clock:
    """The clock of a rank on ``device``; its ``start`` began with this process."""
    began = time.perf_counter() - max(0.0, time.time() - psutil.Process().create_time())
    return clock_since(began, device)


class Straggler(NamedTuple):
    """A rank that has been slow for some time."""

    rank: int
    host: str
    times: float
    """Its own part, to the median of the other ranks."""

    def __str__(self) -> str:
        words = f"its own part of a step takes {self.times:.1f} times as long as that of the others, who wait for it"
        return f"Rank {self.rank} on {self.host} is a straggler: {words}."


class Stragglers:
    """Watches windows of a training; names each straggler once, and again if it was quick in between.

    Args:
        hosts: of each rank; empty: watch nothing.
    """

    def __init__(self, hosts: Sequence[str], *, seconds: float = WINDOW_SECONDS, windows: int = WINDOWS) -> None:
        self._hosts = hosts
        self._seconds = seconds
        self._windows = windows
        self._own = [0.0] * len(hosts)
        self._wall = 0.0
        self._slow = [0] * len(hosts)  # windows in a row

    def look(self, own: Sequence[float], wall: float) -> list[Straggler]:
        """New stragglers.

        Args:
            own: seconds that each rank has spent on its own part since the last look; empty where there is one rank.
            wall: seconds that all have taken for it, waiting included.
        """
        if len(own) < 2 or not self._hosts:
            return []
        for rank, seconds in enumerate(own):
            self._own[rank] += seconds
        self._wall += wall
        if self._wall < self._seconds:
            return []
        found = []
        for rank, seconds in enumerate(self._own):
            others = statistics.median(self._own[:rank] + self._own[rank + 1 :])
            if seconds > SLOWER * others and seconds - others > COST * self._wall:
                self._slow[rank] += 1
            else:
                self._slow[rank] = 0
            if self._slow[rank] == self._windows:
                found.append(Straggler(rank, self._hosts[rank], round(seconds / max(others, 1e-9), 2)))
        self._own = [0.0] * len(own)
        self._wall = 0.0
        return found


@cache
def _peak_tflops() -> dict[str, dict[str, float]]:
    """Pattern of a device's name -> precision -> peak."""
    return yaml.read(Path(__file__).with_name("peak_tflops.yaml"))[0]


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOP/s of a device by the name that torch gives it; None where it is not known, as of CPUs.

    Args:
        precision: of the matrix products: fp32, tf32, bf16, fp16 or o2, which is fp16.
    """
    precision = precision.replace("o2", "fp16")
    if " MIG " in device:
        return None  # a slice of one
    for pattern, tflops in _peak_tflops().items():
        if re.search(rf"(?<![\w]){pattern}(?![\w])", device):
            return tflops[precision] * 1e12 if precision in tflops else None
    return None


def flops_per_image(model: nn.Module, chans: int, image_size: int) -> float | None:
    """FLOPs of one image in an update, forward and backward; None for a model that cannot be traced without data.

    Nothing is computed, no memory is taken, and the model stays as it is: tensors that have only a shape stand for its
    parameters.
    """
    from torch.func import functional_call
    from torch.utils.flop_counter import FlopCounterMode

    state: dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[name] = tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
    images = torch.empty(_IMAGES, chans, image_size, image_size, device="meta")
    trained = [tensor for tensor in state.values() if tensor.requires_grad]
    was_training = model.training
    model.train()
    try:
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(functional_call(model, state, (images,)).sum(), trained, allow_unused=True)
        return counter.get_total_flops() / _IMAGES or None
    except Exception:  # code of the user's own may look at values; then there is no MFU, and no harm done
        return None
    finally:
        model.train(was_training)
