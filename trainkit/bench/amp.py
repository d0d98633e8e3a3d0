"""Is a narrower number format faster here, and does it save memory?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.bench import columns, words
from trainkit.bench.arms import Arm, Bench, LeftOut, Where
from trainkit.config.schema import cpu_has_bf16

if TYPE_CHECKING:
    from trainkit.bench.results import Results
    from trainkit.config.schema import Config

NAMES = ("fp32", "tf32", "bf16", "fp16", "o2")


def arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """All formats that the device has; what crawls there, and O2, only if asked for."""
    found: list[Arm | LeftOut] = []
    capability = where.places[0].capability
    for name in asked or NAMES:
        why = ""
        if name == "tf32" and capability < (8, 0):
            why = "only NVIDIA GPUs from Ampere on have it"
        elif name == "bf16" and where.gpu and capability < (8, 0) and not asked:
            why = "this GPU emulates it (--arms fp32,bf16 measures it)"
        elif name == "fp16" and not where.gpu and not asked:
            why = "it crawls on a CPU (--arms fp32,fp16 measures it)"
        elif name == "o2" and not asked:
            continue
        found.append(LeftOut(name, why) if why else Arm(name, (f"train.precision={name}",)))
    return found


def meaning(results: Results) -> str:
    first, others = results.rows[0], results.rows[1:]
    told = [row for row in others if row.ratio is not None]
    leaner = [(row.memory_ratio, row.name) for row in others if row.memory_ratio is not None and row.memory_ratio < 1]
    ratio, lean = min(leaner, default=(1.0, ""))
    if not told:
        more = f" {lean} takes {ratio:.2f} of the memory of {first.name}." if lean else ""
        return words.no_difference(results) + more
    best = max(told, key=lambda row: row.speed)
    if best.speed <= 1:
        spared = f", or {lean} for {ratio:.2f} of the memory" if lean else ""
        slower = f"{best.name} trains {best.speed:.2f} x as fast"
        use = f"use train.precision={first.name}{spared}{words.untold(results)}"
        return f"Nothing is clearly faster than {first.name} here, {slower}; {use}."
    memory = ""
    if best.memory_ratio is not None:
        memory = f" {'and' if best.memory_ratio < 1 else 'but'} takes {best.memory_ratio:.2f} of the memory"
    gain = f"{best.name} trains {best.speed:.2f} x as fast as {first.name} here{memory}"
    return f"{gain}; use train.precision={best.name}{words.worse_loss(first, best, results)}{words.untold(results)}."


def notes(config: Config, where: Where) -> list[str]:
    if where.gpu or cpu_has_bf16():
        return []
    return ["This CPU has neither AVX512-BF16 nor AMX: it computes bf16 by way of float32."]


BENCH = Bench(
    name="amp",
    question="Does mixed precision help here?",
    arms=arms,
    meaning=meaning,
    columns=(*columns.COMPARED, columns.LARGEST, columns.LOSS),
    names=NAMES,
    dispensable=("min to max",),
    largest=True,
    notes=notes,
)
