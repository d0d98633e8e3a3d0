"""The folder of a bench: that of a run, with files of its own."""

from __future__ import annotations

from pathlib import Path

from trainkit.records.rundir import RunDir


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
