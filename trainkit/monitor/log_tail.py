"""Progress of a run for people, as lines or a bar, by what it writes into its folder; and the logs of its ranks."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from trainkit.common import fileio, terminal
from trainkit.config.task_metrics import TaskMetrics
from trainkit.run.events import typed_event
from trainkit.run.folder import RunDir
from trainkit.run.metrics import measured_in, task_metrics, typed_record

_LOOK_SECONDS = 0.2
_PART_BYTES = 1 << 20
_LONGEST_LOG = 1 << 30
"""Bytes of a log that are read at once. A sparse file of 300 GB takes no room on a disk, and holds nothing."""


def follow(run_dir: RunDir, is_alive: Callable[[], bool], output: OutputTail | None = None) -> None:
    """Show a run's progress until it has finished or failed, across requeues.

    On a terminal this is one bar; elsewhere one line a record. Events before the newest ``submitted`` are history of
    earlier submissions of the same run and end nothing.

    Args:
        is_alive: whether the job may still write; asked several times a second. False ends the following, for a run
            that was killed leaves no event.
        output: shown as well, of a script that need not write records.
    """
    events = RecordTail(run_dir.events)
    metrics = RecordTail(run_dir.metrics)
    kind = ProgressBar if sys.stdout.isatty() and output is None else Lines
    view = kind(0, task_metrics(run_dir))
    with closing(view):
        history = events.read()
        since = 0
        for index, event in enumerate(history):
            if event.get("event") == "submitted":
                since = index
        story = _Story(view)
        ended = story.show(history[since:])
        alive = True
        while True:
            # Metrics after events, and both after asking: what a run wrote before its end must still be shown.
            if output is not None:
                output.show()
            records = metrics.read()
            if records and (output is None or not story.is_logged):
                view.metrics = task_metrics(run_dir)  # it is written before the first record
                typed = (typed_record(raw, view.metrics) for raw in records)
                view.log_all(list(filter(None, typed)))
            if ended or not alive:
                return
            time.sleep(_LOOK_SECONDS)
            alive = is_alive()
            ended = story.show(events.read())


class RecordTail:
    """Reader of what was appended to a JSON-lines file since the last look; a torn line is left for the next."""

    def __init__(self, path: Path) -> None:
        self._file = LogTail(path, pattern=re.compile("^{"), most=fileio.MOST_JSONL_BYTES)

    def read(self) -> list[dict[str, Any]]:
        found = []
        with suppress(OSError):  # not there yet
            for part in self._file.new():
                for line in part.split("\n"):
                    if len(line) < fileio.LONGEST_LINE:
                        found.append(fileio.parse_object(line))
        return list(filter(None, found))


class _Story:
    """The events of a submission, as they are shown."""

    def __init__(self, view: Lines) -> None:
        self._view = view
        self._newest = -1
        self.is_logged = False
        """The ranks have loggers, which write into their output as well."""

    def show(self, events: list[dict[str, Any]]) -> bool:
        """Show events in order; return True if one of them ended the run for good: nothing is left to train.

        A failed attempt need not: the job may be queued again. What an attempt says after a newer one has started is
        that of ranks which SLURM took for dead.
        """
        over = False
        for raw in events:
            event = typed_event(raw)
            if not event:
                continue
            kind = event["event"]
            attempt = event.get("attempt")
            if attempt is None:
                attempt = self._newest
            if kind in ("failed", "ended", "handed_back") and attempt < self._newest:
                continue
            line = _event_line(event)
            if kind == "started":
                self._view.begin(event.get("total_steps", 0))
                self.is_logged |= "precision" in event  # of `trainkit.rank`, not of a script that calls trainkit.log
                if event.get("attempt") == self._newest:  # it is said already, see `read_events`
                    continue
                self._newest = max(self._newest, attempt)
            if line:
                self._view.say(line)
            is_end = kind == "ended" and event.get("state") == "COMPLETED"
            over = (over or is_end) and kind != "prolonged"
        return over


def _event_line(event: Mapping[str, Any]) -> str | None:
    if event["event"] == "started":
        return _started_line(event)
    known = defaultdict(lambda: "?", event)
    why = event.get("why", "")
    how = "Starts again in place" if event.get("in_place") is True else "Requeued"
    of_total = f" of {event['total_steps']}" if event.get("total_steps") else ""
    lines = {
        "starting": f"Starting: {known['what']}",
        "data_waits": f"Waits for {known['file']}, {known['seconds']} s so far: {why or 'it does not answer'}.",
        "handed_back": "Told to stop: saved.",
        "prolonged": f"Prolonged: continues from step {known['step']} to {known['total_steps']}.",
        "requeued": f"{how}; continues from its last checkpoint.",
        "stopped_early": f"Stopped early after {known['step']} of {known['total_steps']} steps: {why}.",
        "pruned": f"Pruned after {known['step']}{of_total} steps: {why}.",
        "failed": f"Failed on rank {known['rank']}: {event.get('error', 'see its log')}",
    }
    return lines.get(event["event"]) or setback_line(event)


def _started_line(event: Mapping[str, Any]) -> str:
    who = f"Attempt {event.get('attempt', '?')}: {terminal.plural(event.get('world_size') or 0, 'rank')}"
    hosts = list(dict.fromkeys(event.get("hosts") or ()))
    if hosts:
        who += f" on {', '.join(hosts[:4])}"
    if len(hosts) > 4:
        who += f" and {len(hosts) - 4} more"
    words = [who]
    for key in ("device", "precision"):
        if key in event:
            words.append(f"{key} {event[key]}")
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
        """Read what has been written since, in parts. Raises OSError where the file cannot be read.

        Args:
            to_the_end: nobody writes it any more, so a line without its end is one too.
        """
        with fileio.open_regular(self.path) as file:
            end = os.fstat(file.fileno()).st_size  # what comes while it is read is for the next look
            if end - self._offset > self.most:
                yield f"{self.label}--- left out: {end - self._offset - self.most:,} bytes of {self.path.name}\n"
                self._offset = end - self.most
                self._rest = b""
            file.seek(self._offset)
            while self._offset < end:
                part = file.read(min(_PART_BYTES, end - self._offset))
                if not part:
                    break
                self._offset += len(part)
                yield self._shown(part)
        if to_the_end and self._rest:
            yield self._shown(b"\n")

    def _shown(self, part: bytes) -> str:
        if not self.label and self.pattern is None:  # whatever stands there, lines or half of them: progress bars
            return part.decode(errors="replace")
        *whole, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > 16 * _PART_BYTES:  # a line that nobody reads, and that would fill the memory
            whole.append(self._rest)
            self._rest = b""
        text = ""
        for raw in whole:
            line = raw.decode(errors="replace")
            if self.pattern is None or self.pattern.search(line):
                text += f"{self.label}{line}\n"
        return text


def logs_of(logs: Path, ranks: Sequence[int], *, ending: str, pattern: re.Pattern[str] | None) -> list[LogTail]:
    """Logs of these ranks; each line says whose it is if there are several.

    Args:
        ending: ``out`` or ``err``.
    """
    width = len(str(max(ranks, default=0)))
    found = []
    for rank in ranks:
        label = f"[rank {rank:{width}}] " if len(ranks) > 1 else ""
        found.append(LogTail(logs / f"rank-{rank}.{ending}", label, pattern))
    return found


class OutputTail:
    """Output of rank 0 from an attempt of a run on, read on from the last look."""

    def __init__(self, run_dir: RunDir, first: int) -> None:
        self._run = run_dir
        self._first = first
        self._tails: dict[Path, LogTail] = {}

    def show(self) -> None:
        """Print what is new, the errors to stderr."""
        for attempt in self._run.attempts():
            if attempt >= self._first:
                self._show(attempt, "out", sys.stdout)
                self._show(attempt, "err", sys.stderr)

    def _show(self, attempt: int, ending: str, stream: TextIO) -> None:
        path = self._run.attempt_logs(attempt) / f"rank-0.{ending}"
        tail = self._tails.setdefault(path, LogTail(path))
        with suppress(FileNotFoundError):  # the ranks have not begun
            for text in tail.new():
                stream.write(terminal.log_text(text))
            stream.flush()


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number in ``spec``; ``nan`` for what the record holds as null, because JSON has no NaN."""
    if value is None:
        return f"nan{unit}"
    return f"{value:{spec}}{unit}"


def metric_words(record: Mapping[str, Any], metrics: TaskMetrics) -> list[str]:
    """Measured values of a record, each with its name and unit; what is absent is left out."""
    head = metrics.headline
    keys = ["loss", head, "lr", "images_per_sec"]
    if record.get("split") != "train":
        keys += [*metrics.metrics, *measured_in(record)]
    words = []
    for key in dict.fromkeys([*keys, f"ema_{head}"]):
        if key not in record:
            continue
        if key == "lr":
            words.append(f"lr {number(record[key], '.2e')}")
        elif key == "images_per_sec":
            words.append(number(record[key], ",.0f", " images/s"))
        else:
            words.append(metrics.words(key, record[key]))
    return words


def record_line(record: Mapping[str, Any], metrics: TaskMetrics, total_steps: int, eta_seconds: float | None) -> str:
    """One record as one line: split, epoch, step, metrics and, when known, the time to go."""
    width = len(str(total_steps))
    head = f"{record.get('split', '?'):5}"
    if "epoch" in record:
        head += f"  epoch {number(record['epoch'], '6.2f')}"
    # A swarm's peers make as many updates as time allows: there is no total.
    of_total = f"/{total_steps}" if total_steps else ""
    words = [f"{head}  step {record.get('step', 0):>{width}}{of_total}", *metric_words(record, metrics)]
    if eta_seconds is not None:
        words.append(f"ETA {terminal.age(eta_seconds)}")
    return "  ".join(words)


class Lines:
    """A run's progress for a person: one line a record, flushed, so that `logs -f` shows it at once."""

    def __init__(self, total_steps: int, metrics: TaskMetrics) -> None:
        self.total_steps = total_steps
        self.metrics = metrics
        self._first: tuple[int, float] | None = None  # step and time of this attempt's first record

    def begin(self, total_steps: int) -> None:
        """Another attempt begins."""
        self.total_steps = total_steps
        self._first = None

    def log(self, record: Mapping[str, Any]) -> None:
        eta = self._eta(record) if record.get("split") == "train" else None
        self.say(record_line(record, self.metrics, self.total_steps, eta))

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take records that were read at once."""
        for record in records:
            self.log(record)

    def say(self, line: str) -> None:
        """Show another line."""
        terminal.say(line)

    def close(self) -> None: ...

    def _eta(self, record: Mapping[str, Any]) -> float | None:
        """Seconds to go, at the pace since the first record: the steps before it also paid for warming up."""
        step = record.get("step", 0)
        now = record.get("time", 0.0)
        if self._first is None:
            self._first = (step, now)
        first_step, began = self._first
        if step <= first_step or not self.total_steps:
            return None
        seconds: float = (now - began) / (step - first_step) * (self.total_steps - step)
        return seconds


class ProgressBar(Lines):
    """On a terminal: a bar for training, and a line above it for every evaluation.

    No redirection of stdout and no refreshing thread: `breakpoint()` must still find a usable terminal.
    """

    def __init__(self, total_steps: int, metrics: TaskMetrics, *, resumed_step: int = 0) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(total_steps, metrics)
        self._progress = Progress(
            "{task.fields[where]}",
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            speed_estimate_period=120.0, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        where = "waiting for the first step"
        self._task = self._progress.add_task("", total=None, completed=resumed_step, where=where, text="")
        self.begin(total_steps)
        self._progress.start()

    def begin(self, total_steps: int) -> None:
        super().begin(total_steps)
        self._progress.update(self._task, total=total_steps or None)

    def log(self, record: Mapping[str, Any]) -> None:
        if record.get("split") != "train":
            super().log(record)
            return
        step = record.get("step", 0)
        text = "  ".join(metric_words(record, self.metrics))
        where = f"step {step}/{self.total_steps}" if self.total_steps else f"step {step}"
        self._progress.update(self._task, completed=step, where=where, text=text, refresh=True)

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        # A thousand old records read at once must not look like a thousand steps a second.
        newest = []
        for record in records:
            if record.get("split") == "train":
                newest = [record]
            else:
                self.log(record)
        super().log_all(newest)

    def say(self, line: str) -> None:
        self._progress.print(line, highlight=False, markup=False)
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


def setback_line(event: Mapping[str, Any]) -> str | None:
    """An event about an update that came to nothing, as one line; None for every other event."""
    kind = event.get("event")
    step = event.get("step", "?")
    if kind == "skipped":
        where = f" of {event['parameter']}" if "parameter" in event else ""
        scale = f"loss scale {number(event.get('scale_before'), 'g')} -> {number(event.get('scale_after'), 'g')}"
        return f"Overflow after step {step}, skipping step: a gradient{where} was not finite; {scale}"
    if kind == "nonfinite":
        norm = event.get("grad_norm")
        of_norm = f", gradients' norm {norm}" if norm is not None else ""
        return f"Step {step} was skipped: a gradient was not finite; loss {event.get('loss', '?')}{of_norm}"
    if kind == "rolled_back":
        return f"Rolled back from step {event.get('from_step', '?')} to step {step}; continues with other data."
    return None
