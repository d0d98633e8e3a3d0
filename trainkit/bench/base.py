"""Types of a bench: the request, arms, places, rows, results and columns."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.common.terminal import plural

if TYPE_CHECKING:
    from trainkit.config.schema import Config


FEWEST_ROUNDS = 3
"""Fewer rounds cannot tell a difference from chance."""
CONTROL = "control"
"""The first arm once more, in every round."""
WITHIN = "within the spread of the first arm"
NONE = "-"
"""An empty cell."""
LOSS_TOLERANCE = 0.05
"""Losses that differ by a larger share are reported."""
ENOUGH = 0.95
"""Share of the highest rate beyond which more memory or processes gain nothing."""


@dataclass(frozen=True)
class BenchRequest:
    """The content of ``bench.json``."""

    bench: str
    preset: str
    arms: tuple[str, ...] = ()
    """Names of the arms to measure; none: those that make sense where it runs."""
    rounds: int = 7
    seconds: float = 1.0
    """About how long a turn takes."""
    updates: int | None = None
    """In a turn; None: as many as fit."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> BenchRequest:
        """Raises UserError for a file that is not there, or something else."""
        from pydantic import TypeAdapter, ValidationError  # which `submit --help` does without

        what = f"{file.parent} is not the folder of a bench."
        fix = "`python -m jobs.bench NAME` creates one."
        try:
            return TypeAdapter(cls).validate_json(fileio.read_bytes(file))
        except OSError as error:
            raise UserError(what, why=f"{file.name}: {error.strerror}", fix=fix) from None
        except ValidationError:
            why = f"{file.name}: It is damaged or not the request of a bench."
            raise UserError(what, why=why, fix=fix) from None


@dataclass(frozen=True)
class Arm:
    """One of the ways that are compared."""

    name: str
    overrides: tuple[str, ...] = ()
    """Overrides of the configuration."""
    ranks: tuple[int, ...] | None = None
    """Ranks that take part; None: all."""
    work: str = "train"
    """Work of the ranks: a method ``do_...`` of `trainkit.bench.rank.Worker`."""
    size: int = 0
    """An argument of that method: a batch, or bytes."""
    base: str = ""
    """The arm that it is compared with; empty: the first."""
    series: str = ""
    """Arms of one series differ in their size or their number of ranks alone."""


@dataclass(frozen=True)
class SkippedArm:
    """An arm that cannot be here, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Place:
    """One rank of the job."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    device: str
    """The GPU's name, or ``cpu``."""
    formats: tuple[str, ...] = ("fp32",)
    """Number formats that the device multiplies itself."""
    gpus: int = 0
    """GPUs that the rank sees."""
    cpus: int = 1


@dataclass(frozen=True)
class Where:
    """All ranks of the job."""

    places: tuple[Place, ...]
    train_images: int = 0
    params: int = 0
    """Parameters of the model; 0 where they were not counted."""
    room_mb: float = 0.0
    """Memory of the rank that has least; 0 where it was not told."""

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def gpu(self) -> bool:
        return self.places[0].device != "cpu"

    @property
    def hosts(self) -> list[str]:
        """Names of the nodes, in order of rank."""
        return list(dict.fromkeys(place.host for place in self.places))

    @property
    def nodes(self) -> int:
        return 1 + max(place.node_rank for place in self.places)

    @property
    def ranks_per_node(self) -> int:
        return sum(place.node_rank == 0 for place in self.places)

    @property
    def gpus(self) -> int:
        """Number of GPUs that rank 0 sees."""
        return self.places[0].gpus

    def in_words(self) -> str:
        names = ", ".join(self.hosts[:4])
        if len(self.hosts) > 4:
            names += f" and {len(self.hosts) - 4} more"
        return f"{plural(self.world_size, 'rank')} on {names}, {self.places[0].device}"

    def nameless(self) -> str:
        """The same without names."""
        return f"{plural(self.world_size, 'rank')} on {plural(self.nodes, 'node')}, {self.places[0].device}"


@dataclass
class ArmFigures:
    """Figures of one arm."""

    name: str
    arm: Arm
    failed: str = ""
    """Why it could not be measured, or not to the end."""
    outcome: str = ""
    """Outcome of a proof: passed, refused or failed."""
    figure: str = ""
    rates: list[float] = field(default_factory=list)
    """One a round, in the bench's unit."""
    ratio: float | None = None
    """Median over the rounds of its rate to that of the arm that it is compared with; None: see ``why_none``."""
    ratios: list[float] = field(default_factory=list)
    why_none: str = ""
    memory_mb: float | None = None
    """Median of the peaks of the rank that needs most."""
    memory_ratio: float | None = None
    loss: float | None = None
    largest: int | None = None
    """Micro batch that fits."""
    extra: dict[str, float] = field(default_factory=dict)
    """Medians of whatever else its samples hold."""

    @property
    def median(self) -> float:
        """0 where it was not measured."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def speed(self) -> float:
        """The ratio; 0 where there is none."""
        return self.ratio or 0.0


@dataclass(frozen=True)
class Results:
    """Figures of a whole bench, finished or not."""

    bench: Bench
    request: BenchRequest
    rows: list[ArmFigures]
    left_out: list[tuple[str, str]]
    control: list[float]
    """The first arm's second turn to its first, round by round."""
    problem: str
    """Why no ratio may be believed; empty where they may."""
    rounds: int
    """Complete ones."""
    updates: int
    where: str
    ended: bool
    notes: list[str]

    @property
    def ran(self) -> list[ArmFigures]:
        return [row for row in self.rows if row.rates]

    @property
    def compared(self) -> list[ArmFigures]:
        """The arms whose speed can be told."""
        return [row for row in self.rows[1:] if row.ratio is not None]

    @property
    def roughly(self) -> str:
        """A word to put before a rate where the rates may not be believed."""
        return "roughly " if self.problem else ""

    def series(self, name: str) -> list[ArmFigures]:
        return [row for row in self.rows if row.arm.series == name]

    @property
    def meaning(self) -> str:
        """Meaning of the figures, in one sentence."""
        if self.bench.proves or len(self.ran) > 1:
            return self.bench.meaning(self)
        return self.no_difference()

    def no_difference(self) -> str:
        """Why no ratio is printed."""
        if not self.ran and not self.ended:
            return "There is nothing to compare yet: no arm has been measured."
        if not self.ran:
            return "There is nothing to compare: no arm could run here."
        if len(self.ran) == 1:
            return f"There is nothing to compare: only {self.ran[0].name} could run here."
        whys = dict.fromkeys(row.why_none for row in self.ran if row.why_none)
        return f"No difference can be measured here: {'; '.join(whys)}."


Column = tuple[str, Callable[[ArmFigures, Results], str]]
"""A column of the table: its name, and a row's cell."""


@dataclass(frozen=True)
class Bench:
    """One question: its arms, its table, and what that means."""

    name: str
    question: str
    arms: Callable[[Config, Where, Sequence[str]], list[Arm | SkippedArm]]
    """The third argument: names that were asked for."""
    meaning: Callable[[Results], str]
    """One sentence."""
    columns: tuple[Column, ...]
    names: tuple[str, ...] = ()
    """Names of arms that can be asked for; none: they are numbers."""
    lowest: int = 1
    """Lowest of these numbers."""
    dispensable: tuple[str, ...] = ("min to max",)
    """Columns that a narrow terminal does without."""
    amount: str = "images"
    """Field of a sample that counts its work."""
    unit: str = "images/s"
    scale: float = 1.0
    """From the sample's amount per second to ``unit``."""
    same_updates: bool = False
    """All arms make as many updates, so that their losses compare; else each as many as fit into its turn."""
    proves: bool = False
    """Its arms are run once and pass, are refused or fail; nothing is measured in turns."""
    fewest_ranks: int = 1
    strategy: str = ""
    """Strategy that the configuration is planned with; empty: its own."""
    largest: bool = False
    """Look for the largest batch as well, where that is quick."""
    stops: Callable[[Arm, Mapping[str, Mapping[str, Any]], float], str] = lambda arm, trials, room_mb: ""
    """Why an arm is not even tried, after the trials of those before it and with ``room_mb`` for a rank; or empty."""
    notes: Callable[[Config, Where], list[str]] = lambda config, where: []
    """Notes that a reader should know before the figures."""


def fastest(results: Results) -> tuple[ArmFigures, str]:
    """Return the fastest arm, or the first where none is clearly faster, and a clause on how much faster it is."""
    first = results.rows[0]
    best = max(results.compared, key=lambda row: row.speed)
    trains = f"{best.name} trains {best.speed:.2f} x as fast"
    if best.speed > 1:
        return best, f"{trains} as {first.name} here"
    return first, f"Nothing is clearly faster than {first.name} here, {trains}"


def fewest(rows: Sequence[ArmFigures], speed: Callable[[ArmFigures], float]) -> ArmFigures:
    """Return the smallest arm that comes to `ENOUGH` of the highest speed."""
    best = max(map(speed, rows))
    fast = [row for row in rows if speed(row) >= ENOUGH * best]
    return min(fast, key=lambda row: row.arm.size)


def compare_losses(results: Results) -> str:
    """Say in a sentence whether all arms have learned the same; empty where no two losses can be compared."""
    ran = results.ran
    if len(ran) < 2 or ran[0].loss is None:
        return ""
    first = ran[0].loss
    updates = f"after {results.updates} updates"
    losses = []
    for row in ran:
        if row.loss is None:
            losses.append(f"{row.name} not finite")
        elif abs(row.loss - first) > LOSS_TOLERANCE * abs(first):
            losses.append(f"{row.name} {row.loss:.3g}")
    if not losses:
        return f"All come to the same loss {updates}."
    return f"But {updates} the loss differs: {ran[0].name} {first:.3g}, {', '.join(losses)}."


def powers_of_two(most: int) -> list[int]:
    """2, 4, 8 ... up to ``most``."""
    return [1 << power for power in range(1, most.bit_length())]


def rate(value: float | None) -> str:
    """A number of four digits, thousands apart."""
    if not value:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f} %"


def _number(name: str, key: str, text: str) -> Column:
    """A column with a number of each row."""

    def cell(row: ArmFigures, results: Results) -> str:
        value = getattr(row, key)
        if value is None:
            return NONE
        return text.format(value)

    return name, cell


def _spread(row: ArmFigures, results: Results) -> str:
    if not row.rates:
        return NONE
    return f"{rate(min(row.rates))} to {rate(max(row.rates))}"


ARM: Column = ("arm", lambda row, results: row.name)
RATE: Column = ("images/s", lambda row, results: rate(row.median))
SPREAD: Column = ("min to max", _spread)
SPEED = _number("speed", "ratio", "{:.2f} x")
MEMORY = _number("memory", "memory_mb", "{:,.0f} MiB")
MEMORY_RATIO = _number("of first", "memory_ratio", "{:.2f}")
LOSS = _number("loss", "loss", "{:.4g}")
EXPOSED: Column = ("exposed", lambda row, results: percent(row.extra.get("exposed_share")))
TIMED = (ARM, RATE, SPREAD, SPEED)
COMPARED = (*TIMED, MEMORY, MEMORY_RATIO)
