"""What is compared: arms, where they run, and who asked for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from trainkit import fileio
from trainkit.bench import words
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.bench.results import Results, Row
    from trainkit.config.schema import Config

CONTROL = "control"
"""The first arm once more, in every round."""
WITHIN = "within what the first arm differs from itself"
FEWEST_ROUNDS = 3
"""With fewer nobody can tell a difference from chance."""


@dataclass(frozen=True)
class Request:
    """What somebody wants to know; `bench.json` in the folder of the bench."""

    bench: str
    preset: str
    arms: tuple[str, ...] = ()
    """Those that were asked for; none: what makes sense where it runs."""
    rounds: int = 7
    seconds: float = 1.0
    """About how long a turn takes."""
    updates: int | None = None
    """In a turn; None: as many as fit."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> Request:
        """Raises UserError for a file that is not there, or something else."""
        try:
            return TypeAdapter(cls).validate_json(fileio.read_bytes(file))
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "It is damaged, or no request of a bench."
            raise UserError(
                f"{file.parent} is not the folder of a bench.",
                why=f"{file.name}: {why}",
                fix="`python -m jobs.bench NAME` makes one.",
            ) from None


@dataclass(frozen=True)
class Arm:
    """One of the ways that are compared."""

    name: str
    overrides: tuple[str, ...] = ()
    """What it changes in the configuration."""
    ranks: tuple[int, ...] | None = None
    """Those that take part; None: all."""
    work: str = "train"
    """What they do: a function in `trainkit.bench.work`."""
    size: int = 0
    """What that function takes beside the configuration: a batch, or bytes."""
    base: str = ""
    """The arm that it is compared with; empty: the first."""
    series: str = ""
    """Arms of one series are one line of the plot, over ``x``."""
    x: float = 0.0


@dataclass(frozen=True)
class LeftOut:
    """An arm that cannot be here, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Place:
    """What one rank says of where it is."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    device: str
    """The GPU's name, or ``cpu``."""
    capability: tuple[int, int] = (0, 0)
    """Of an NVIDIA GPU."""
    gpus: int = 0
    """That the rank sees."""
    cpus: int = 1


@dataclass(frozen=True)
class Where:
    """All ranks of the job."""

    places: tuple[Place, ...]
    train_images: int = 0
    params: int = 0
    """Of the model; 0 where nobody has asked."""

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def gpu(self) -> bool:
        return self.places[0].device != "cpu"

    @property
    def nodes(self) -> int:
        return 1 + max(place.node_rank for place in self.places)

    @property
    def ranks_per_node(self) -> int:
        return sum(place.node_rank == 0 for place in self.places)

    @property
    def gpus(self) -> int:
        """That rank 0 sees."""
        return self.places[0].gpus if self.gpu else 0

    def in_words(self) -> str:
        """Where it was measured."""
        device = self.places[0].device
        hosts = list(dict.fromkeys(place.host for place in self.places))
        shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        return f"{words.ranks(self.world_size)} on {shown}, {device}"


Column = tuple[str, Callable[["Row", "Results"], str]]
"""A column of the table: its name, and a row's cell."""


@dataclass(frozen=True)
class Bench:
    """One question: its arms, its table, and what that means."""

    name: str
    question: str
    arms: Callable[[Config, Where, Sequence[str]], list[Arm | LeftOut]]
    """Of a configuration and a place; the third are the names that were asked for."""
    meaning: Callable[[Results], str]
    """One sentence."""
    columns: tuple[Column, ...]
    names: tuple[str, ...] = ()
    """Of arms that can be asked for; none: they are numbers."""
    lowest: int = 1
    """Of these numbers."""
    dispensable: tuple[str, ...] = ()
    """Columns that a narrow terminal does without."""
    amount: str = "images"
    """What a sample counts."""
    unit: str = "images/s"
    scale: float = 1.0
    """From the sample's amount per second to ``unit``."""
    same_updates: bool = True
    """All arms make as many updates, so that their losses compare; else each as many as fit into its turn."""
    fewest_ranks: int = 1
    strategy: str = ""
    """That the configuration is planned with; empty: its own."""
    largest: bool = False
    """The largest batch is looked for as well, where that is quick."""
    stops: Callable[[Arm, Mapping[str, Mapping[str, Any]], float], str] = field(default=lambda arm, trials, room: "")
    """Why an arm is not even tried, after the trials of those before it and with so many MiB for a rank; or empty."""
    notes: Callable[[Config, Where], list[str]] = field(default=lambda config, where: [])
    """What a reader should know before the figures."""
    ideal: bool = False
    """The picture says where a line would go if each rank were worth as much as the first."""
    axis: str = ""
    """What the x of the arms is, where they are lines."""


def check_asked(bench: Bench, asked: Sequence[str]) -> None:
    """Refuse names that are none of this bench's arms."""
    from trainkit.errors import did_you_mean

    for name in asked:
        if bench.names and name not in bench.names:
            raise UserError(
                f"'{name}' is no arm of bench {bench.name}.",
                why=f"It has: {', '.join(bench.names)}.",
                fix=did_you_mean(name, bench.names, otherwise=f"For example --arms {','.join(bench.names[:2])}."),
            )
        if not bench.names and not (name.isdecimal() and bench.lowest <= int(name) < 1 << 24):
            raise UserError(
                f"'{name}' is no arm of bench {bench.name}.",
                why=f"Its arms are whole numbers from {bench.lowest} on.",
                fix="For example --arms 16,32,64.",
            )
    if len(set(asked)) < len(asked):
        raise UserError("--arms names an arm twice.", why="The first one is its own control.", fix="Give each once.")
