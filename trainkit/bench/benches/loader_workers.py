"""Bench loader: numbers of loader processes, with image files and with packs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.bench import base
from trainkit.bench.base import ENOUGH, Arm, Bench, Results, SkippedArm, Where, fewest, percent, powers_of_two, rate
from trainkit.common import terminal
from trainkit.common.terminal import plural

if TYPE_CHECKING:
    from trainkit.config.schema import Config


def loader_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """The model fed from memory, which is the ceiling; then numbers of loader processes, with files and with packs."""
    cpus = max(where.places[0].cpus // where.ranks_per_node, 1)
    workers = list(map(int, asked)) or [0, 1, *powers_of_two(min(cpus, 32))]
    data = config.data
    sources: dict[str, tuple[str, ...]] = {"": ()}  # as they are configured
    if data.pack is not None:
        sources[", files"] = ("data.pack=null", "data.stage=false")
    elif ":" not in data.name:
        for pack in sorted(Path(data.root).glob(f"{data.name}-*.pack")):
            side = pack.stem.rpartition("-")[2]
            if side.isdecimal():
                sources[f", pack {side}"] = (f"data.pack={side}",)
    found: list[Arm | SkippedArm] = [Arm("model alone", work="ceiling")]
    for source, overrides in sources.items():
        for count in workers:
            name = f"{plural(count, 'worker')}{source}"
            found.append(Arm(name, (f"data.workers={count}", *overrides), work="feed", size=count))
    return found


def loader_meaning(results: Results) -> str:
    ceiling = results.rows[0]
    fed = [row for row in results.rows[1:] if row.rates]
    if not fed:
        return results.no_difference()
    enough = fewest(fed, lambda row: row.median)
    use = " ".join(word for word in enough.arm.overrides if not word.startswith("data.stage"))
    if not ceiling.rates or (enough.why_none and base.WITHIN not in enough.why_none):
        return results.no_difference()
    share = enough.ratio
    if share is None:
        share = 1.0
    trains = f"with {enough.name} the model trains at {share:.2f} of what it does fed from memory"
    if share >= ENOUGH:
        return f"The data keeps up: {trains}; use {use}."
    command = terminal.command("prepare", "DATASET", "--pack", "256")
    meaning = f"The data does not keep up: {trains}, and more processes gain nothing; use {use}"
    if any("pack" in row.name for row in fed):
        return f"{meaning}."
    return f"{meaning}; image files can be packed ({command})."


LOADER = Bench(
    name="loader", question="Does the data keep up here?", arms=loader_arms, meaning=loader_meaning, lowest=0,
    columns=(
        base.ARM, ("trains", base.RATE[1]), base.SPREAD, ("of ceiling", base.SPEED[1]),
        ("loads alone", lambda row, results: rate(row.extra.get("loads_per_sec"))),
        ("waits", lambda row, results: percent(row.extra.get("data_share"))),
    ),
)  # fmt: skip
