"""Where the time of a rank goes: at any moment it is spent on exactly one thing, so that the parts are the whole.

The parts, in the words of records (``seconds_<part>``) and of the summary (``seconds``):

    start       from the start of the process to the first batch: imports, meeting the others, model, first data
    data        waiting for the next batch, and for its copy to the GPU where that is not over in time
    copy        making of it what the model takes: augmented, float32, normalised, in the model's layout
    forward     with the loss
    backward    until this rank has its own gradients
    exposed     communication that no computation hides: from there until the gradients are the sum of all ranks', which
                includes waiting for slower ranks. Not all of it: what a strategy does inside the passes (the gathers of
                ``fsdp``, BatchNorm's sums) is counted as the pass in which it is waited for
    optimizer   clipping, update, the weights' average, clearing
    checkpoint  what training waits for
    evaluation  validation and test
    other       the loop itself: schedule, meters, records, votes, with waiting for other ranks in them
    end         after the last update, but for the last checkpoint and the test

On a GPU the passes are queued, not done, when Python goes on: so time is taken there by events in the stream, which
are read where the loop waits for the device anyway. They cut its time line as a whole, pauses included: ``data`` is
how long the GPU had nothing to do because there was no batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import psutil
import torch
from torch import Tensor
from torch.autograd import Variable

PARTS = (
    "start", "data", "copy", "forward", "backward", "exposed", "optimizer", "checkpoint", "evaluation", "other", "end",
)  # fmt: skip
START, DATA, COPY, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER, END = range(len(PARTS))

TRAINING = (DATA, COPY, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, OTHER)
"""What training steps consist of."""
OWN = (DATA, COPY, FORWARD, BACKWARD, OPTIMIZER)
"""What a rank does without waiting for others."""

_MOST_PENDING = 4096


class Spent(Protocol):
    """What the clock keeps up to date: see `trainkit.training.progress.Progress`."""

    train_seconds: float
    seconds: dict[str, float]


class Clock:
    """Time by Python's own clock: right where computing is done when Python goes on.

    Args:
        began: when ``start`` began, by `time.perf_counter`; None: now.
    """

    def __init__(self, began: float | None = None) -> None:
        self.steps = 0
        """Updates since the last lap: the loop counts them."""
        self.part = START
        """What time is spent on now."""
        self._waiting = START  # until the first batch is there
        self._since = time.perf_counter() if began is None else began
        self._seconds = [0.0] * len(PARTS)
        self._lap = [0.0] * len(PARTS)

    def to(self, part: int) -> None:
        """From here on time is spent on ``part``."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        self.part, self._since = part, now

    def wait(self) -> None:
        """From here on it is spent waiting for a batch."""
        self.to(self._waiting)

    def step(self) -> None:
        """One more update is made."""
        self.steps += 1
        self._waiting = DATA

    def watch_backward(self, loss: Tensor) -> None:
        """Have the backward pass of ``loss`` say when this rank's own gradients are all there.

        When a pass ends torch calls back whoever asked for it, in the order of asking: DDP and FSDP, which wait for
        the other ranks then, ask when gradients come; this asks before there are any.
        """
        loss.register_hook(self._ask_for_the_end)

    def _ask_for_the_end(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: self.to(EXPOSED))

    def settle(self, spent: Spent) -> None:
        """Add to ``spent`` what has been spent since the last time."""
        self.to(self.part)
        self._read()
        for part, seconds in enumerate(self._seconds):
            self._lap[part] += seconds
            spent.seconds[PARTS[part]] = spent.seconds.get(PARTS[part], 0.0) + seconds
        spent.train_seconds += sum(self._seconds[part] for part in TRAINING)
        self._seconds = [0.0] * len(PARTS)

    def lap(self, spent: Spent) -> Lap:
        """`settle`, and what was spent since the last lap."""
        self.settle(spent)
        lap = Lap(self._lap, self.steps)
        self._lap, self.steps = [0.0] * len(PARTS), 0
        return lap

    def _read(self) -> None: ...


class StreamClock(Clock):
    """Time by events in the GPU's current stream. All of this needs the device to be current."""

    def __init__(self, began: float | None = None) -> None:
        super().__init__(began)
        super().to(START)  # what was before is the host's time
        self._free: list[torch.cuda.Event] = []
        self._marks: list[tuple[int, torch.cuda.Event]] = []  # part, and where it begins
        self.to(START)

    def to(self, part: int) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))
        self.part = part
        if len(self._marks) >= _MOST_PENDING:
            self._take(sum(mark.query() for _, mark in self._marks))

    def _read(self) -> None:
        self._marks[-1][1].synchronize()
        self._take(len(self._marks))

    def _take(self, done: int) -> None:
        """Add up the first ``done`` marks, which the device has passed; the last of them stays as a beginning."""
        for (part, begin), (_, end) in zip(self._marks[:done], self._marks[1:done], strict=False):
            self._seconds[part] += begin.elapsed_time(end) / 1000
            self._free.append(begin)
        self._marks = self._marks[max(done - 1, 0) :]


class Lap:
    """What was spent between two records."""

    def __init__(self, seconds: list[float], steps: int) -> None:
        self.seconds, self.steps = seconds, steps

    @property
    def training(self) -> float:
        """Seconds in training steps, validation and saving excluded."""
        return sum(self.seconds[part] for part in TRAINING)

    @property
    def own(self) -> float:
        """Seconds in training steps without waiting for other ranks."""
        return sum(self.seconds[part] for part in OWN)

    def fields(self, *, ranks: int) -> Mapping[str, float | None]:
        """For a record: seconds of each part; ``exposed`` is null where there is nobody to communicate with."""
        return {
            f"seconds_{name}": None if part == EXPOSED and ranks == 1 else round(self.seconds[part], 4)
            for part, name in enumerate(PARTS)
            if part not in (START, END) or self.seconds[part]
        }


def clock_of(device: torch.device) -> Clock:
    """For a rank on ``device``; its ``start`` began with this process."""
    began = time.perf_counter() - max(0.0, time.time() - psutil.Process().create_time())
    return StreamClock(began) if device.type == "cuda" else Clock(began)
