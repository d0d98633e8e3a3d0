"""How fast do the ranks exchange gradients, within a node and between nodes?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.bench import columns
from trainkit.bench.arms import Arm, Bench, LeftOut, Where

if TYPE_CHECKING:
    from trainkit.bench.results import Results
    from trainkit.config.schema import Config

NAMES = ("within", "between", "all")
SIZES = (1 << 16, 1 << 20, 1 << 24)
LARGE = 1 << 28
"""For GPUs only: gloo would take seconds."""
GRADIENTS = "gradients"


def arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """All-reduces of several sizes, and of this model's gradients: over a node, a rank of each node, and all ranks."""
    who = {
        "within": tuple(place.rank for place in where.places if place.node_rank == 0),
        "between": tuple(place.rank for place in where.places if place.local_rank == 0),
        "all": tuple(place.rank for place in where.places),
    }
    found: list[Arm | LeftOut] = []
    seen: set[tuple[int, ...]] = set()
    for name in asked or NAMES:
        if len(who[name]) < 2:
            found.append(LeftOut(name, "there is one rank on a node" if name == "within" else "there is one node"))
            continue
        if who[name] in seen:  # of one node, or of one rank each, all are no others
            continue
        seen.add(who[name])
        sizes = [(terminal.size(size), size) for size in (*SIZES, *((LARGE,) * where.gpu))]
        gradients = [(f"{GRADIENTS}, {terminal.size(4 * where.params)}", 4 * where.params)] * bool(where.params)
        for text, size in [*sizes, *gradients]:
            found.append(Arm(f"{name}, {text}", (), who[name], "reduce", size, series=name, x=size / 1e6))
    return found


def meaning(results: Results) -> str:
    best = {}
    for name in NAMES:
        rates = [row.median or 0.0 for row in results.rows if row.arm.series == name and row.rates]
        if rates:
            best[name] = max(rates)
    where = {"within": "within a node", "between": "between nodes", "all": "over all ranks"}
    said = ", ".join(f"{columns.rate(value)} GB/s {where[name]}" for name, value in best.items())
    own = [row for row in results.rows if GRADIENTS in row.name and row.rates]
    last = ""
    if own:
        seconds = own[-1].extra.get("seconds", 0.0)
        size = own[-1].name.rpartition(", ")[2]
        last = f"; exchanging this model's gradients ({size}) takes {1000 * seconds:.3g} ms an update"
    return f"An all-reduce moves {'roughly ' * bool(results.problem)}{said}{last}."


BENCH = Bench(
    name="network",
    question="How fast is the network here?",
    arms=arms,
    meaning=meaning,
    columns=(
        columns.ARM,
        ("GB/s", columns.RATE[1]),
        columns.SPREAD,
        ("takes", lambda row, results: f"{1000 * row.extra['seconds']:.3g} ms" if "seconds" in row.extra else "-"),
    ),
    names=NAMES,
    amount="bytes",
    unit="GB/s",
    scale=1e-9,
    same_updates=False,
    fewest_ranks=2,
    strategy="ddp",
    axis="message, MB",
)
