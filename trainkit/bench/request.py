"""What somebody asks a bench, and the folder where the answer goes: that of a run, with files of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.run.folder import RunDir

FEWEST_ROUNDS = 3
"""Fewer rounds cannot tell a difference from chance."""


@dataclass(frozen=True)
class Request:
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
    def read(cls, file: Path) -> Request:
        """Raises UserError for a file that is not there, or something else."""
        from pydantic import TypeAdapter, ValidationError  # which `submit --help` does without

        try:
            return TypeAdapter(cls).validate_json(fileio.read_bytes(file))
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "It is damaged, or no request of a bench."
            raise UserError(
                f"{file.parent} is not the folder of a bench.",
                why=f"{file.name}: {why}",
                fix="`python -m jobs.bench NAME` makes one.",
            ) from None


class BenchDir(RunDir):
    """Paths of one bench."""

    @property
    def request(self) -> Path:
        return self.path / "bench.json"

    @property
    def samples(self) -> Path:
        """What was measured, a line a turn."""
        return self.path / "samples.jsonl"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def picture(self) -> Path:
        return self.path / "bench.svg"


def refuse_bench(path: Path) -> None:
    """Raises UserError for the folder of a bench: no training goes on in it, and none repeats it."""
    bench = BenchDir(path.absolute())
    if bench.request.exists():
        raise UserError(
            f"{bench.name} is a bench, which is not gone on with.",
            why="Turns that were taken at other times, or on other nodes, do not compare; and no training began in it.",
            fix=f"`{terminal.command('bench', '--show', bench.path)}` shows what it has measured; start another one.",
        )
