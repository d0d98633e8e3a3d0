"""The folder of a bench: that of a run, with files of its own."""

from __future__ import annotations

from pathlib import Path

from trainkit import terminal
from trainkit.errors import UserError
from trainkit.run.folder import RunDir


def refuse_bench(path: Path) -> None:
    """Raises UserError for the folder of a bench, for whoever would train on in it, or again what it names."""
    bench = BenchDir(path.absolute())
    if bench.request.exists():
        raise UserError(
            f"{bench.name} is a bench, which is not gone on with.",
            why="Turns that were taken at other times, or on other nodes, do not compare; and no training began in it.",
            fix=f"`{terminal.command('bench', '--show', bench.path)}` shows what it has measured; start another one.",
        )


class BenchDir(RunDir):
    """Paths of one bench."""

    @property
    def request(self) -> Path:
        """What was asked."""
        return self.path / "bench.json"

    @property
    def samples(self) -> Path:
        """What was measured, turn by turn."""
        return self.path / "samples.jsonl"

    @property
    def results(self) -> Path:
        """What the samples come to."""
        return self.path / "results.json"

    @property
    def picture(self) -> Path:
        return self.path / "bench.png"
