"""Following a run by what it writes into its folder, so that it works for every executor; and the logs of its ranks."""

import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit import fileio
from trainkit.monitor import Bar, Lines, setback_line
from trainkit.run.events import typed_event
from trainkit.run.folder import RunDir
from trainkit.run.metrics import described, typed_record

_LOOK_SECONDS = 0.2
_PART_BYTES = 1 << 20
_LONGEST_LOG = 1 << 30
"""Bytes of a log that are read at once. A sparse file of 300 GB takes no room on a disk, and holds nothing."""


def follow(run_dir: RunDir, is_alive: Callable[[], bool]) -> None:
    """Show a run's progress until it has finished or failed, across requeues.

    On a terminal this is one bar; elsewhere one line a record. Events before the newest ``submitted`` are history of
    earlier submissions of the same run and end nothing.

    Args:
        is_alive: whether the job may still write; asked several times a second. False ends the following, for a run
            that was killed leaves no event.
    """
    events, metrics = RecordTail(run_dir.events), RecordTail(run_dir.metrics)
    view = (Bar if sys.stdout.isatty() else Lines)(0, described(run_dir))
    with closing(view):
        history = events.read()
        since = max((index for index, event in enumerate(history) if event.get("event") == "submitted"), default=0)
        story = _Story(view)
        ended, alive = story.show(history[since:]), True
        while True:
            # Metrics after events, and both after asking: what a run wrote before its end must still be shown.
            if records := metrics.read():
                view.metrics = described(run_dir)  # it is written before the first record
                typed = (typed_record(raw, view.metrics) for raw in records)
                view.log_all([record for record in typed if record is not None])
            if ended or not alive:
                return
            time.sleep(_LOOK_SECONDS)
            alive = is_alive()
            ended = story.show(events.read())


class RecordTail:
    """What was appended to a JSON-lines file since the last look. A line without its end is left for the next."""

    def __init__(self, path: Path) -> None:
        self._file = LogTail(path, pattern=re.compile("^{"), most=fileio.MOST_JSONL_BYTES)

    def read(self) -> list[dict[str, Any]]:
        found = []
        with suppress(OSError):  # not there yet
            for part in self._file.new():
                found += [fileio.parse_object(line) for line in part.split("\n") if len(line) < fileio.LONGEST_LINE]
        return [record for record in found if record is not None]


class _Story:
    """The events of a submission, as they are shown."""

    def __init__(self, view: Lines) -> None:
        self._view, self._newest = view, -1

    def show(self, events: list[dict[str, Any]]) -> bool:
        """Show events in order; whether one of them ended the run for good: nothing is left to train.

        A failed attempt need not: the job may be queued again. What an attempt says after a newer one has started is
        that of ranks which SLURM took for dead.
        """
        over = False
        for event in filter(None, map(typed_event, events)):
            kind, attempt = event["event"], event.get("attempt")
            if kind in ("failed", "ended", "handed_back") and type(attempt) is int and attempt < self._newest:
                continue
            if kind == "started":
                self._newest = max(self._newest, attempt if type(attempt) is int else 0)
                self._view.begin(event.get("total_steps", 0))
            if line := _event_line(event):
                self._view.say(line)
            is_end = kind == "ended" and event.get("state") == "COMPLETED"
            over = (over or is_end) and kind != "prolonged"
        return over


def _event_line(event: Mapping[str, Any]) -> str | None:
    known, why = defaultdict(lambda: "?", event), event.get("why", "")
    lines = {
        "starting": f"Starting: {known['what']}",
        "data_waits": f"Waits for {known['file']}, {known['seconds']} s so far: {why or 'it does not answer'}.",
        "handed_back": "Told to stop: saved.",
        "prolonged": f"Prolonged: goes on from step {known['step']} to {known['total_steps']}.",
        "requeued": "Requeued; goes on from its last checkpoint.",
        "stopped_early": f"Stopped early after {known['step']} of {known['total_steps']} steps: {why}.",
        "pruned": f"Pruned after {known['step']} of {known['total_steps']} steps: {why}.",
        "failed": f"Failed on rank {known['rank']}: {event.get('error', 'see its log')}",
    }
    return _started_line(event) if event["event"] == "started" else lines.get(event["event"]) or setback_line(event)


def _started_line(event: Mapping[str, Any]) -> str:
    ranks = event.get("world_size", "?")
    who = f"Attempt {event.get('attempt', '?')}: {ranks} rank{'' if ranks == 1 else 's'}"
    if hosts := list(dict.fromkeys(event.get("hosts") or ())):
        who += f" on {', '.join(hosts[:4])}" + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    words = [who, *(f"{key} {event[key]}" for key in ("device", "precision") if key in event)]
    if "total_steps" in event:
        words.append(f"{event['total_steps']} steps")
    return ", ".join(words)


@dataclass
class LogTail:
    """One rank's file, read on from where the last look ended.

    Args:
        label: stands before every line.
        pattern: only lines in which it is found.
        most: bytes that are read at once; what is older nobody waits for.
    """

    path: Path
    label: str = ""
    pattern: re.Pattern[str] | None = None
    most: int = field(default_factory=lambda: _LONGEST_LOG)
    _offset: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def new(self, *, to_the_end: bool = False) -> Iterator[str]:
        """What has been written since, in parts. Raises OSError where the file cannot be read.

        Args:
            to_the_end: nobody writes it any more, so a line without its end is one too.
        """
        with fileio.open_regular(self.path) as file:
            end = os.fstat(file.fileno()).st_size  # what comes while it is read is for the next look
            if end - self._offset > self.most:
                yield f"{self.label}--- left out: {end - self._offset - self.most:,} bytes of {self.path.name}\n"
                self._offset, self._rest = end - self.most, b""
            file.seek(self._offset)
            while self._offset < end and (part := file.read(min(_PART_BYTES, end - self._offset))):
                self._offset += len(part)
                yield self._shown(part)
        if to_the_end and self._rest:
            yield self._shown(b"\n")

    def _shown(self, part: bytes) -> str:
        if not self.label and self.pattern is None:  # whatever stands there, lines or half of them: progress bars
            return part.decode(errors="replace")
        *whole, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > 16 * _PART_BYTES:  # a line that nobody reads, and that would fill the memory
            whole, self._rest = [*whole, self._rest], b""
        lines = (line.decode(errors="replace") for line in whole)
        return "".join(f"{self.label}{line}\n" for line in lines if self.pattern is None or self.pattern.search(line))


def logs_of(logs: Path, ranks: Sequence[int], *, ending: str, pattern: re.Pattern[str] | None) -> list[LogTail]:
    """The logs of these ranks; each line says whose it is if there are several.

    Args:
        ending: ``out`` or ``err``.
    """
    width = len(str(max(ranks, default=0)))
    labels = [f"[rank {rank:{width}}] " if len(ranks) > 1 else "" for rank in ranks]
    return [LogTail(logs / f"rank-{rank}.{ending}", label, pattern) for rank, label in zip(ranks, labels, strict=True)]
