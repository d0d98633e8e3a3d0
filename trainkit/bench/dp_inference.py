"""Does DataParallel make inference faster, and from which batch on?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.bench import columns
from trainkit.bench.arms import Arm, Bench, LeftOut, Where

if TYPE_CHECKING:
    from trainkit.bench.results import Results
    from trainkit.config.schema import Config

ONE, ALL = "one device", "DataParallel"
SIZES = (1, 4, 16, 64, 256, 1024)


def arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """Forward passes of several batch sizes, on one device and split over all that one process sees."""
    sizes = [int(name) for name in asked] or list(SIZES)
    found: list[Arm | LeftOut] = [
        Arm(f"{ONE}, {size}", ("strategy.name=single",), (0,), "infer", size, series=ONE, x=size) for size in sizes
    ]
    if where.gpus < 2:
        return [*found, LeftOut(ALL, f"it splits batches over GPUs, and here {'is one' if where.gpus else 'are none'}")]
    return found + [
        Arm(f"{ALL}, {size}", ("strategy.name=dp",), (0,), "infer", size, f"{ONE}, {size}", ALL, size) for size in sizes
    ]


def meaning(results: Results) -> str:
    one = [row for row in results.rows if row.arm.series == ONE and row.rates]
    split = [row for row in results.rows if row.arm.series == ALL and row.rates]
    about = "roughly " * bool(results.problem)
    best = max(one, key=lambda row: row.median or 0.0, default=None)
    alone = (
        f"One device classifies most, {about}{columns.rate(best.median)} images/s, in batches of {best.arm.size}"
        if best
        else ""
    )
    if not split:
        return f"{alone}; DataParallel takes two GPUs, so there is nothing to compare it with."
    faster = [row for row in split if row.ratio is not None and row.speed > 1]
    if not faster:
        return f"DataParallel is not faster than one device with any of these batches. {alone}."
    first, most = min(faster, key=lambda row: row.arm.size), max(faster, key=lambda row: row.speed)
    return (
        f"DataParallel is faster than one device from batches of {first.arm.size} on, at most {most.speed:.2f} x, with "
        f"{most.arm.size}. {alone}."
    )


BENCH = Bench(
    name="dp-inference",
    question="Does DataParallel help inference here?",
    arms=arms,
    meaning=meaning,
    columns=(*columns.TIMED, columns.MEMORY),
    dispensable=("min to max",),
    same_updates=False,
    strategy="dp",
    axis="batch",
)
