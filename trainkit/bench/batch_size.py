"""Which micro batch is fastest, and how large may it be?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.bench import columns, words
from trainkit.bench.arms import Arm, Bench, LeftOut, Where

if TYPE_CHECKING:
    from trainkit.bench.results import Results
    from trainkit.config.schema import Config

HEADROOM = 0.1
"""So much of the memory stays free."""
LONGEST_UPDATE = 15.0
"""Seconds of one update, after which larger ones are not tried."""
_SMALLEST = 8
"""Times as small as that of the configuration: what is smaller still nobody wants."""
ENOUGH = 0.95
"""Of the highest rate: what a larger batch gains beyond is not worth its memory."""


def arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """First that of the configuration, then powers of two as far as there is data; updates are of one micro batch."""
    own = config.train.given_micro_batch_size or max(config.train.global_batch_size // where.world_size, 1)
    most = where.train_images // where.world_size
    powers = [1 << power for power in range(1, 24) if own // _SMALLEST <= 1 << power != own]
    sizes = [int(name) for name in asked] or [own, *powers]
    found: list[Arm | LeftOut] = []
    for size in sizes:
        if size <= most:
            overrides = (f"train.global_batch_size={size * where.world_size}", f"train.micro_batch_size={size}")
            found.append(Arm(str(size), overrides, size=size, x=size))
        elif asked:
            found.append(LeftOut(str(size), f"there are {where.train_images} images to train on"))
    return found


def stops(arm: Arm, trials: Mapping[str, Mapping[str, Any]], room_mb: float) -> str:
    """Whether a size should not fit, by the line through the two largest before it, or would take too long."""
    known = sorted((int(name), max(told.get("memory_mb") or [0.0]), told) for name, told in trials.items())
    below = [one for one in known if one[0] < arm.size]
    if not below:
        return ""
    size, peak, told = below[-1]
    seconds = told["seconds"] / told["updates"]
    if seconds > LONGEST_UPDATE:
        return f"not tried: an update of {size} takes {seconds:.0f} s already"
    slope = (peak - below[-2][1]) / (size - below[-2][0]) if len(below) > 1 else peak / size
    foretold = peak + max(slope, 0.0) * (arm.size - size)
    if room_mb and foretold > room_mb * (1 - HEADROOM):
        return f"does not fit: it would take about {foretold:,.0f} of {room_mb:,.0f} MiB"
    return ""


def meaning(results: Results) -> str:
    first, ran = results.rows[0], [row for row in results.rows if row.rates and not row.failed]
    told = [row for row in ran if row.ratio is not None]
    largest = max(ran, key=lambda row: row.arm.size)
    last = f"the largest that ran is {largest.name}"
    if not told:
        return f"{words.no_difference(results)[:-1]}; {last}."
    best = max(row.speed for row in told)
    if best <= 1:
        return f"No micro batch trains faster than {first.name} here; {last}."
    enough = min((row for row in told if row.speed >= ENOUGH * best), key=lambda row: row.arm.size)
    return (
        f"Micro batches of {enough.name} train {enough.speed:.2f} x as fast as {first.name} here, "
        f"larger ones hardly faster, and {last}; use train.micro_batch_size={enough.name}."
    )


BENCH = Bench(
    name="batch-size",
    question="Do larger batches help here?",
    arms=arms,
    meaning=meaning,
    columns=(("micro batch", columns.ARM[1]), *columns.COMPARED[1:]),
    dispensable=("min to max",),
    same_updates=False,
    stops=stops,
    axis="micro batch",
)
