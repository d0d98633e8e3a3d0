"""How near `train.micro_batch_size=auto` comes to what truly fits.

ResNet-50 at 224 pixels, bf16, channels_last. `auto` leaves a tenth of the memory free and takes a divisor of the global
batch, which here has many. What truly fits is bisected to 1 %: each size trains in a fresh process whose allocator runs
out of memory at those nine tenths.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.benchmarks.arms.turns import Job
from tests.benchmarks.measuring import Figure
from tests.benchmarks.resident import resident
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

GLOBAL_BATCH = 720_720
"""Of its divisors above 90 the next is at most a twelfth larger."""
GOAL = 0.95
WHAT = "train.micro_batch_size=auto, to the largest that trains in the nine tenths of memory that it may take"


def measure(rounds: int = 1) -> list[Figure]:
    """The line of the table; it is not a matter of time, and ``rounds`` change nothing."""
    if not torch.cuda.is_available():
        return [Figure(WHAT, "", note="not measured: no GPU here")]
    with TemporaryDirectory() as folder:
        job = Job("resnet50", 224, 1000, 2, "")
        return [against_truth(Path(folder), job, GLOBAL_BATCH)]


@dataclass(frozen=True)
class Found:
    """What `auto` has come to."""

    size: int
    budget_mb: float


def against_truth(folder: Path, job: Job, global_batch: int, *more: str) -> Figure:
    """``more``: settings of the kit's, of the run that finds a size by itself."""
    found = by_itself(folder, replace(job, global_batch=global_batch, more=more))
    tried = dict[int, bool]()

    def fits(size: int) -> bool:
        tried[size] = trains(folder, replace(job, batch=size), found.budget_mb)
        return tried[size]

    largest, above = bisected(found.size, fits)
    ratio = found.size / largest if largest else 0.0
    truth = f"{largest} train in {found.budget_mb:,.0f} MiB" if largest else "not even these train"
    figure = f"{ratio:.3f}; {found.size}, {truth}, {above} do not; {len(tried)} fresh processes"
    return Figure(WHAT, figure, goal=f"at least {GOAL}", met=ratio >= GOAL)


def by_itself(folder: Path, job: Job) -> Found:
    """The size that the kit finds, without training with it."""
    own = replace(job, out=str(folder / "auto.json"), warm=0, more=("train.micro_batch_size=auto", *job.more))
    with resident({"kit": own}) as arms:
        arms["kit"].report()
    (probed,) = read_events(RunDir(Path(f"{own.out}.run")), "probed")
    return Found(probed["micro_batch_size"], 0.9 * probed["room_mb"])


def trains(folder: Path, job: Job, memory_mb: float) -> bool:
    """Whether three updates of two passes each fit into so much memory. On a CPU nothing limits it, and it is asked
    what it has had."""
    size = job.batch
    own = replace(
        job, out=str(folder / f"{size}.json"), warm=6, global_batch=2 * size, memory_mb=memory_mb,
        more=(f"train.micro_batch_size={size}", *job.more),
    )  # fmt: skip
    with resident({"kit": own}) as arms:
        try:
            told = arms["kit"].report()
        except AssertionError as error:
            if "memory with micro batches of" not in str(error):
                raise
            return False
    return job.device == "cuda" or max(told["memory_mb"]) <= memory_mb


def bisected(start: int, fits: Callable[[int], bool]) -> tuple[int, int]:
    """The largest that fits and one above that does not, 1 % apart at most; 0 and ``start`` if that does not."""
    if not fits(start):
        return 0, start
    low, high = start, start + max(start // 10, 1)
    while fits(high):
        low, high = high, high + max(high // 5, 1)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high
