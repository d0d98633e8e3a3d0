"""Benches on one device: number formats, sizes of the micro batch, several runs at the same time, inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.bench import base
from trainkit.bench.base import Arm, Bench, Results, SkippedArm, Where, compare_losses, fastest, fewest, rate

if TYPE_CHECKING:
    from trainkit.config.schema import Config

FORMATS = ("fp32", "tf32", "bf16", "fp16", "o2")
HEADROOM = 0.1
"""Share of the memory that stays free."""
LONGEST_UPDATE = 15.0
"""Seconds of one update, after which larger ones are not tried."""
_SMALLEST = 8
"""Batches down to this fraction of the configuration's are tried."""
ONE = "one device"
ALL = "DataParallel"


def amp_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """All formats that the device has; a slow one, and O2, only if asked for."""
    found: list[Arm | SkippedArm] = []
    has = where.places[0].formats
    for name in asked or FORMATS[:-1]:
        if name == "tf32" and name not in has:
            found.append(SkippedArm(name, "only NVIDIA GPUs from Ampere on support it"))
        elif name == "bf16" and where.gpu and name not in has and not asked:
            found.append(SkippedArm(name, "this GPU emulates it (--arms fp32,bf16 measures it)"))
        elif name == "fp16" and not where.gpu and not asked:
            found.append(SkippedArm(name, "it is very slow on a CPU (--arms fp32,fp16 measures it)"))
        else:
            found.append(Arm(name, (f"train.precision={name}",)))
    return found


def amp_meaning(results: Results) -> str:
    if not results.compared:
        return results.no_difference()
    best, said = fastest(results)
    if best.memory_ratio is not None:  # which the first has not
        also = "and" if best.memory_ratio < 1 else "but"
        said += f" {also} takes {best.memory_ratio:.2f} of the memory"
    return f"{said}; use train.precision={best.name}. {compare_losses(results)}".rstrip()


def amp_notes(config: Config, where: Where) -> list[str]:
    from trainkit.cluster.survey import cpu_formats

    if where.gpu or "bf16" in cpu_formats():
        return []
    return ["This CPU has neither AVX512-BF16 nor AMX: it computes bf16 in float32."]


AMP = Bench(
    name="amp", question="Does mixed precision help here?", arms=amp_arms, meaning=amp_meaning, names=FORMATS,
    columns=(*base.COMPARED, ("largest batch", lambda row, results: str(row.largest or base.NONE)), base.LOSS),
    same_updates=True, largest=True, notes=amp_notes,
)  # fmt: skip


def batch_size_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """First the configuration's, then powers of two up to the number of images; updates are of one micro batch."""
    own = config.train.given_micro_batch_size or max(config.train.global_batch_size // where.world_size, 1)
    sizes = list(map(int, asked))
    if not asked:
        sizes.append(own)
        for power in base.powers_of_two(1 << 23):
            if power >= own // _SMALLEST and power != own:
                sizes.append(power)
    found: list[Arm | SkippedArm] = []
    for size in sizes:
        if size <= where.train_images // where.world_size:
            overrides = (f"train.global_batch_size={size * where.world_size}", f"train.micro_batch_size={size}")
            found.append(Arm(str(size), overrides, size=size))
        elif asked:
            found.append(SkippedArm(str(size), f"there are {where.train_images} images to train on"))
    return found


def batch_size_stops(arm: Arm, trials: Mapping[str, Mapping[str, Any]], room_mb: float) -> str:
    """Say why a size is not tried: by the line through the two before it, it would not fit or take too long."""
    smaller = sorted(size for size in map(int, trials) if size < arm.size)
    if not smaller:
        return ""
    size = smaller[-1]
    trial = trials[str(size)]
    seconds = trial["seconds"] / trial["updates"]
    if seconds > LONGEST_UPDATE:
        return f"not tried: an update of {size} takes {seconds:.0f} s already"
    peak = _peak_mb(trial)
    slope = peak / size
    if len(smaller) > 1:
        slope = (peak - _peak_mb(trials[str(smaller[-2])])) / (size - smaller[-2])
    predicted = peak + max(slope, 0.0) * (arm.size - size)
    if room_mb and predicted > room_mb * (1 - HEADROOM):
        return f"does not fit: it would take about {predicted:,.0f} of {room_mb:,.0f} MiB"
    return ""


def _peak_mb(trial: Mapping[str, Any]) -> float:
    """The memory of the rank that took most; 0 where it was not told."""
    peaks: list[float] = trial.get("memory_mb") or [0.0]
    return max(peaks)


def batch_size_meaning(results: Results) -> str:
    first = results.rows[0]
    ran = [row for row in results.ran if not row.failed]
    if not ran:
        return results.no_difference()
    last = f"the largest that ran is {max(ran, key=lambda row: row.arm.size).name}"
    compared = [row for row in ran if row.ratio is not None]
    if not compared:
        return f"{results.no_difference()[:-1]}; {last}."
    if max(row.speed for row in compared) <= 1:
        return f"No micro batch trains faster than {first.name} here; {last}."
    enough = fewest(compared, lambda row: row.speed)
    faster = f"Micro batches of {enough.name} train {enough.speed:.2f} x as fast as {first.name} here"
    return f"{faster}, larger ones hardly faster, and {last}; use train.micro_batch_size={enough.name}."


BATCH_SIZE = Bench(
    name="batch-size", question="Do larger batches help here?", arms=batch_size_arms, meaning=batch_size_meaning,
    columns=(("micro batch", base.ARM[1]), *base.COMPARED[1:]), stops=batch_size_stops,
)  # fmt: skip


def sharing_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """Numbers of runs at the same time on one device."""
    found: list[Arm | SkippedArm] = []
    for name in asked or ("1", "2", "4"):
        found.append(Arm(name, (), (0,), "beside", int(name)))
    return found


def sharing_meaning(results: Results) -> str:
    if not results.compared:
        return results.no_difference()
    best = max(results.compared, key=lambda row: row.speed)
    gain = f"; use launch.runs_per_gpu={best.name}" if best.speed > 1 else ": no gain"
    first = results.rows[0].name
    return f"{best.name} side by side train {best.speed:.2f} x as many images a second as {first}{gain}."


SHARING = Bench(
    name="sharing", question="Do several runs on one GPU help here?", arms=sharing_arms, meaning=sharing_meaning,
    columns=(("side by side", base.ARM[1]), *base.COMPARED[1:]), strategy="single",
)  # fmt: skip


def dp_inference_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """Forward passes of several batch sizes, on one device and split over all that one process sees."""
    found: list[Arm | SkippedArm] = []
    split: list[Arm | SkippedArm] = []
    for size in map(int, asked or (1, 4, 16, 64, 256, 1024)):
        alone = f"{ONE}, {size}"
        found.append(Arm(alone, ("strategy.name=single",), (0,), "infer", size, series=ONE))
        split.append(Arm(f"{ALL}, {size}", ("strategy.name=dp",), (0,), "infer", size, alone, ALL))
    if where.gpus < 2:
        here = "is one" if where.gpus else "are none"
        split = [SkippedArm(ALL, f"it splits batches over GPUs, but here {here}")]
    return found + split


def dp_inference_meaning(results: Results) -> str:
    one = []
    split = []
    for row in results.ran:
        if row.arm.series == ONE:
            one.append(row)
        else:
            split.append(row)
    alone = ""
    if one:
        best = max(one, key=lambda row: row.median)
        most = f"{results.roughly}{rate(best.median)} images/s"
        alone = f"One device is fastest with batches of {best.arm.size}: {most}"
    if not split:
        return f"{alone}; DataParallel takes two GPUs, so there is nothing to compare it with."
    faster = [row for row in split if row.speed > 1]
    if not faster:
        return f"DataParallel is not faster than one device with any of these batches. {alone}."
    first = min(faster, key=lambda row: row.arm.size)
    best = max(faster, key=lambda row: row.speed)
    gain = f"from batches of {first.arm.size} on, at most {best.speed:.2f} x, with {best.arm.size}"
    return f"DataParallel is faster than one device {gain}. {alone}."


DP_INFERENCE = Bench(
    name="dp-inference", question="Does DataParallel help inference here?", arms=dp_inference_arms,
    meaning=dp_inference_meaning, columns=(*base.TIMED, base.MEMORY), strategy="dp",
)  # fmt: skip
