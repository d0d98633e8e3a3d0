"""What a bench says while it runs: a line for each arm that is tried, and for each round."""

from __future__ import annotations

import sys
from typing import Any

from trainkit import fileio, terminal
from trainkit.bench.arms import Request
from trainkit.bench.benches import bench_of
from trainkit.bench.columns import rate
from trainkit.bench.folder import BenchDir


class Progress:
    """Says what has been written since the last look."""

    def __init__(self, run: BenchDir, *, silent: bool) -> None:
        self._run, self._silent, self._said = run, silent, 0
        self._request = Request.read(run.request)
        self._bench = bench_of(self._request.bench)
        self._round: dict[int, list[str]] = {}
        self._arms = 0

    def show(self) -> None:
        """Print what is new."""
        if self._silent:
            return
        records = list(fileio.read_jsonl(self._run.samples))
        for record in records[self._said :]:
            for line in self._lines(record):
                print(terminal.one_line(line), file=sys.stderr, flush=True)
        self._said = len(records)

    def _lines(self, record: dict[str, Any]) -> list[str]:
        kind, arm = record.get("kind"), record.get("arm", "")
        if kind == "began":
            self._arms = len(record.get("arms", []))
            return [f"{record.get('where')}: {self._arms} arms, {self._request.rounds} rounds"]
        if kind == "failed":
            self._arms -= 1
            return [f"{arm}: {record.get('why')}"]
        if kind == "largest":
            return [f"{arm}: micro batches of {record.get('size')} fit"]
        if kind != "sample":
            return []
        number = int(record.get("round", 0))
        value = rate(self._bench.scale * record[self._bench.amount] / record["seconds"])
        told = self._round.setdefault(number, [])
        told.append(f"{arm} {value}")
        if len(told) <= self._arms:
            return []
        return [f"round {number + 1}/{self._request.rounds}: {'; '.join(told)} {self._bench.unit}"]
