"""Where the time of a run goes, and what it says: clock, stragglers, model FLOPs utilisation, advice, costs.

At any moment the time of a rank is spent on exactly one part, so that the parts are the whole. In the words of records
(``seconds_<part>``) and of the summary (``seconds``):

    start       from the start of the process to the first batch: imports, meeting the others, model, first data
    data        waiting for the next batch, and for its copy to the GPU where that is not over in time
    copy        making of it what the model takes: augmented, float32, normalised, in the model's layout
    forward     with the loss
    backward    until this rank has its own gradients
    exposed     communication that no computation hides: from there until the gradients are the sum of all ranks', which
                includes waiting for slower ranks. What a strategy does inside the passes (the gathers of ``fsdp``,
                BatchNorm's sums) counts as the pass in which it is waited for
    optimizer   clipping, update, the weights' average, clearing
    checkpoint  what training waits for
    evaluation  validation and test
    other       the loop itself: schedule, meters, records, votes, with waiting for other ranks in them
    end         after the last update, but for the last checkpoint and the test

On a GPU the passes are queued, not done, when Python goes on: there events in the stream take the time, and are read
where the loop waits for the device anyway. They cut its time line as a whole, pauses included: ``data`` is how long the
GPU had nothing to do because there was no batch.

A straggler is a rank that makes all others wait. Steps take equally long on all ranks, so what counts is the time of a
rank's own parts. A busy moment makes nobody a straggler, nor does a difference that costs little. Where ranks already
wait for one another within the passes (``fsdp``, synchronized BatchNorm) their own parts grow alike, and no straggler
is seen, rather than the wrong one.

Model FLOPs utilisation (MFU) is that of PaLM, appendix B. FLOPs of an image are those that the model needs for it,
counted once by torch's own counter, in matrix products, convolutions and attention, forward and backward. What is
computed twice to save memory counts once.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from trainkit.config import yaml
from trainkit.config.checks import less_traffic, strategy_traits
from trainkit.config.schema import Config
from trainkit.distributed.device import cpus_of_rank, device_name, peak_memory_mb, reserved_memory_mb
from trainkit.process import visible_cpus
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import energy_of

if TYPE_CHECKING:
    from trainkit.training.build import TrainState
    from trainkit.training.recorder import Progress

PARTS = (
    "start", "data", "copy", "forward", "backward", "exposed", "optimizer", "checkpoint", "evaluation", "other", "end",
)  # fmt: skip
START, DATA, COPY, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER, END = PARTS

OWN = (DATA, COPY, FORWARD, BACKWARD, OPTIMIZER)
"""What a rank does without waiting for others."""
TRAINING = (*OWN, EXPOSED, OTHER)
"""The parts of training steps."""

_MOST_PENDING = 4096


class Clock:
    """Time by Python's own clock: right where the computation is over when Python goes on.

    Args:
        began: when ``start`` began, by `time.perf_counter`; None: now.
    """

    def __init__(self, began: float | None = None) -> None:
        self.steps = 0
        """Updates since the last lap: the loop counts them."""
        self.part = START
        """What time is spent on now."""
        self.at_first_update: Callable[[], None] = lambda: None
        """Called when the first one is made."""
        self._waiting = START  # until the first batch is there
        self._since = time.perf_counter() if began is None else began
        self._seconds, self._lap = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)

    def to(self, part: str) -> None:
        """From here on time is spent on ``part``."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        self.part, self._since = part, now

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """The time of the body is spent on ``part``."""
        before = self.part
        self.to(part)
        yield
        self.to(before)

    def wait(self) -> None:
        """From here on it is spent waiting for a batch."""
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
        self._lap, self.steps = dict.fromkeys(PARTS, 0.0), 0
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
    """By part."""
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
        return {
            f"seconds_{part}": None if part == EXPOSED and ranks == 1 else round(seconds, 4)
            for part, seconds in self.seconds.items()
            if part not in (START, END) or seconds
        }


def clock_since(began: float, device: torch.device) -> Clock:
    """The clock of what a device does from ``began`` on, by `time.perf_counter`."""
    return (Clock if device.type == "cpu" else StreamClock)(began)


def clock_of(device: torch.device) -> Clock:
    """The clock of a rank on ``device``; its ``start`` began with this process."""
    began = time.perf_counter() - max(0.0, time.time() - psutil.Process().create_time())
    return clock_since(began, device)


SLOWER = 1.5
"""How many times as long as the others' median a straggler's own part takes, at least."""
COST = 0.1
"""The share of the time by which the others could be faster, at least."""
WINDOW_SECONDS = 15.0
WINDOWS = 4
"""Windows in a row, of `WINDOW_SECONDS` each, in which both must hold."""


class Straggler(NamedTuple):
    """A rank that has been slow for some time."""

    rank: int
    host: str
    times: float
    """Its own part, to the median of the other ranks."""

    def __str__(self) -> str:
        return (
            f"Rank {self.rank} on {self.host} is a straggler: its own part of a step takes {self.times:.1f} times as "
            "long as that of the others, who wait for it."
        )


class Stragglers:
    """Watches windows of a training; names each straggler once, and again if it was quick in between.

    Args:
        hosts: of each rank; empty: watch nothing.
    """

    def __init__(self, hosts: Sequence[str], *, seconds: float = WINDOW_SECONDS, windows: int = WINDOWS) -> None:
        self._hosts, self._seconds, self._windows = hosts, seconds, windows
        self._own, self._wall = [0.0] * len(hosts), 0.0
        self._slow = [0] * len(hosts)  # windows in a row

    def look(self, own: Sequence[float], wall: float) -> list[Straggler]:
        """New stragglers.

        Args:
            own: seconds that each rank has spent on its own part since the last look; empty where there is one rank.
            wall: seconds that all have taken for it, waiting included.
        """
        if len(own) < 2 or not self._hosts:
            return []
        total = [before + now for before, now in zip(self._own, own, strict=True)]
        self._own, self._wall = total, self._wall + wall
        if self._wall < self._seconds:
            return []
        found = []
        for rank, seconds in enumerate(total):
            others = statistics.median(total[:rank] + total[rank + 1 :])
            is_slow = seconds > SLOWER * others and seconds - others > COST * self._wall
            self._slow[rank] = self._slow[rank] + 1 if is_slow else 0
            if self._slow[rank] == self._windows:
                found.append(Straggler(rank, self._hosts[rank], round(seconds / max(others, 1e-9), 2)))
        self._own, self._wall = [0.0] * len(own), 0.0
        return found


_IMAGES = 2


@cache
def _peak_tflops() -> dict[str, dict[str, float]]:
    """Pattern of a device's name -> precision -> peak."""
    return yaml.read(Path(__file__).with_name("peak_tflops.yaml"))[0]


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOP/s of a device by the name that torch gives it; None where it is not known, as of CPUs.

    Args:
        precision: of the matrix products: fp32, tf32, bf16, fp16 or o2, which is fp16.
    """
    precision = "fp16" if precision == "o2" else precision
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

    state = {
        name: tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
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


ENOUGH_SECONDS = 30.0
"""In a shorter run all that is slow at first would weigh too much."""


def advice(
    seconds: Mapping[str, float], config: Config, *, world_size: int, workers: int, cpus: int, straggler: bool = False
) -> str | None:
    """The change of a setting that would save most, and the share of time it is about; None where nothing stands out.

    Args:
        seconds: of rank 0, by `PARTS`.
        workers: loader processes of each rank.
        cpus: of each rank.
        straggler: one was found: waiting for communication is its fault.
    """
    total = sum(spent for part, spent in seconds.items() if part not in (START, END))
    if total < ENOUGH_SECONDS:
        return None
    share = {part: seconds.get(part, 0.0) / total for part in PARTS}
    train, saving, rarer = config.train, config.checkpoint, math.ceil(share[CHECKPOINT] / 0.03)
    rhythms = {"every_steps": saving.every_steps, "every_epochs": saving.every_epochs}
    if workers < cpus - 1:
        load = f"data.workers={min(cpus - 1, max(4, 2 * workers))}"
    else:
        load = f"more CPUs for each rank, --cpus-per-task {2 * cpus}"
    exchange = less_traffic(config) or f"train.global_batch_size={2 * train.global_batch_size}"
    save = next((f"checkpoint.{name}={rarer * every}" for name, every in rhythms.items() if every), "")
    evaluate = f"train.eval_every_epochs={math.ceil(share[EVALUATION] / 0.1) * train.eval_every_epochs}"
    rows = {  # least share worth a word, that word, and a change
        DATA: (0.2, "data wait", load),
        EXPOSED: (0.2, "waiting for gradients of other ranks", "" if world_size == 1 or straggler else exchange),
        CHECKPOINT: (0.1, "saving", save),
        EVALUATION: (0.3, "validation", evaluate),
        OTHER: (0.2, "records and the loop itself", "monitor.log_every=50" if config.monitor.log_every < 10 else ""),
    }
    found = [
        (share[part] / least, f"{share[part]:.0%} {words}: {change}")
        for part, (least, words, change) in rows.items()
        if change and share[part] >= least
    ]
    return max(found)[1] if found else None


def mfu(state: TrainState, images_per_sec: float | None) -> float | None:
    """Model FLOPs utilisation in percent, over all GPUs; None where the model's FLOPs or the GPU's are not known."""
    device = state.dist.device
    peak = peak_flops(device_name(device), state.precision.name)
    if peak is None or state.flops_per_image is None or images_per_sec is None:
        return None
    takes_all = strategy_traits(state.config.strategy.name).gpus_per_rank == "all"
    gpus = torch.accelerator.device_count() if takes_all else state.dist.world_size
    return round(100 * state.flops_per_image * images_per_sec / (gpus * peak), 2)


def costs(state: TrainState, run: RunDir, seconds: dict[str, float], images_per_sec: float | None) -> dict[str, Any]:
    """The cost of a training for its summary: time, memory of every rank, energy, use of the GPUs. Every rank calls it.

    Args:
        seconds: of this rank, by `PARTS`.
    """
    dist = state.dist
    memory = dist.gather_json([peak_memory_mb(dist.device), reserved_memory_mb(dist.device)])
    if not dist.is_main:
        return {}
    cpus, straggler = cpus_of_rank(dist.env) or visible_cpus(), bool(read_events(run, "straggler"))
    place = {"world_size": dist.world_size, "workers": state.workers, "cpus": cpus}
    return {
        "seconds": {name: round(spent, 3) for name, spent in seconds.items()},
        "mfu": mfu(state, images_per_sec),
        "flops_per_image": state.flops_per_image,
        "max_memory_mb": memory[0][0],
        "max_memory_mb_of_ranks": [most for most, _ in memory],
        "max_memory_reserved_mb_of_ranks": [most for _, most in memory],
        "energy": energy_of(run),
        "advice": advice(seconds, state.config, straggler=straggler, **place),
    }
