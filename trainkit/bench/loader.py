"""Does the data keep up with the model, and how many loader processes does it take?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.bench import columns, words
from trainkit.bench.arms import WITHIN, Arm, Bench, LeftOut, Where

if TYPE_CHECKING:
    from trainkit.bench.results import Results
    from trainkit.config.schema import Config

MODEL = "model alone"
ENOUGH = 0.95
"""Of the highest rate: more processes than that takes gain nothing."""


def arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """The model fed from memory, which is the ceiling; then numbers of loader processes, with files and with packs."""
    cpus = max(where.places[0].cpus // where.ranks_per_node, 1)
    workers = [int(name) for name in asked] or sorted({0, 1, *(1 << n for n in range(1, 6) if 1 << n <= cpus)})
    data, found = config.data, list[Arm | LeftOut]()
    found.append(Arm(MODEL, work="ceiling", series=MODEL))
    sources: list[tuple[str, tuple[str, ...]]] = [("", ())]  # as they are configured
    if data.pack is not None:
        sources.append((", files", ("data.pack=null", "data.stage=false")))
    else:
        packs = sorted(Path(data.root).glob(f"{data.name}-*.pack")) if ":" not in data.name else []
        sides = [one.stem.rpartition("-")[2] for one in packs if one.stem.rpartition("-")[2].isdecimal()]
        sources += [(f", pack {side}", (f"data.pack={side}",)) for side in sides]
    for series, overrides in sources:
        for count in workers:
            name = f"{count} worker{'s' * (count != 1)}{series}"
            found.append(
                Arm(name, (f"data.workers={count}", *overrides), work="feed", size=count, series=series, x=count)
            )
    return found


def meaning(results: Results) -> str:
    ceiling, fed = results.rows[0], [row for row in results.rows[1:] if row.rates]
    if not fed:
        return words.no_difference(results)
    best = max(fed, key=lambda row: row.median or 0.0)
    enough = min(
        (row for row in fed if (row.median or 0.0) >= ENOUGH * (best.median or 0.0)), key=lambda row: row.arm.size
    )
    use = " ".join(word for word in enough.arm.overrides if not word.startswith("data.stage"))
    if not ceiling.rates or (enough.why_none and WITHIN not in enough.why_none):
        return words.no_difference(results)
    share = 1.0 if enough.ratio is None else enough.speed
    trains = f"with {enough.name} the model trains at {share:.2f} of what it does fed from memory"
    if share >= ENOUGH:
        return f"The data keeps up: {trains}; use {use}."
    command = terminal.command("prepare", "DATASET", "--pack", "256")
    more = "" if any("pack" in row.name for row in fed) else f"; image files can be packed ({command})"
    return f"The data does not keep up: {trains}, and more processes gain nothing; use {use}{more}."


BENCH = Bench(
    name="loader",
    question="Does the data keep up here?",
    arms=arms,
    meaning=meaning,
    columns=(
        columns.ARM,
        ("trains", columns.RATE[1]),
        columns.SPREAD,
        ("of ceiling", columns.SPEED[1]),
        ("loads alone", lambda row, results: columns.rate(row.extra.get("loads_per_sec"))),
        ("waits", lambda row, results: columns.percent(row.extra.get("data_share"))),
    ),
    dispensable=("min to max",),
    same_updates=False,
    lowest=0,
    axis="loader processes of a rank",
)
