"""Startup: say what a start is at where it takes long, and what would make it shorter."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainkit.cluster.signals import KeeperLink
from trainkit.common import terminal
from trainkit.common.errors import TrainkitError
from trainkit.run.events import Attempt

if TYPE_CHECKING:
    from trainkit.config.schema import Config


QUIET_SECONDS = 3.0
"""Seconds that a start may take to something before it says so."""
AGAIN_SECONDS = 60.0


class Starting:
    """Context that says on rank 0 what a start is at once that has lasted `QUIET_SECONDS`, and how long it took.

    It prints a line, for `logs`, and writes the event ``starting``, for who follows the run. A thread waits beside, so
    that a start waits for nothing; what cannot be said or written does no harm to the training.

    Args:
        speaks: whether this is the rank that tells of all.
        attempt: to whose record it is added, as soon as its run is there: a template's ranks start before that.
        say: prints the line.
        seconds: until the first line about a step, and until each further one.
    """

    def __init__(
        self,
        *,
        speaks: bool,
        attempt: Attempt | None,
        say: Callable[[str], None] | None = None,
        seconds: tuple[float, float] | None = None,
    ) -> None:
        self.attempt = attempt
        self._speaks = speaks
        self._print = say or _print
        self._quiet, self._again = seconds or (QUIET_SECONDS, AGAIN_SECONDS)
        self._changed = threading.Condition()
        self._hint: Callable[[], str] = str
        self._what = ""
        self._since = 0.0
        self._told = 0.0
        self._thread: threading.Thread | None = None

    def at(self, what: str, hint: Callable[[], str] = str) -> None:
        """From here on the start takes time to ``what``; empty: it is over.

        Args:
            hint: what would make it shorter, in sentences; asked for only where it takes long.
        """
        if not self._speaks:
            return
        with self._changed:
            if self._told:
                self._say(f"it took {time.monotonic() - self._since:.1f} s to {self._what}.")
            self._turn(what, hint)
            if what and self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="starting", daemon=True)
                self._thread.start()

    def __enter__(self) -> Starting:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Say nothing more, whatever the start is at: it has failed, or was over long ago."""
        with self._changed:
            self._turn("", str)

    def join(self) -> None:
        """Wait for the thread beside, once it has nothing more to say: a process with threads is not to be forked."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _turn(self, what: str, hint: Callable[[], str]) -> None:
        self._what = what
        self._hint = hint
        self._since = time.monotonic()
        self._told = 0.0
        self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._what:
                due = self._told + self._again if self._told else self._since + self._quiet
                if self._changed.wait(max(due - time.monotonic(), 0.0)):
                    continue
                hint = "" if self._told else self._hint()
                self._told = time.monotonic()
                self._say(f"{self._told - self._since:.0f} s so far to {self._what}. {hint}".rstrip())
            self._thread = None

    def _say(self, words: str) -> None:
        with suppress(OSError, ValueError, TrainkitError):  # a full disk, a closed pipe, a newer attempt
            self._print(f"Starting: {words}")
            if self.attempt is not None and self.attempt.run.config.is_file():
                self.attempt.remark("starting", what=words, seconds=round(time.monotonic() - self._since, 1))


def _print(line: str) -> None:
    if sys.stdout.isatty():  # a bar that waits for its first step has not ended its line
        line = f"\r\x1b[K{line}"
    terminal.say(line)


@dataclass(frozen=True)
class Reports:
    """To whom a rank reports how it gets on."""

    node: Attempt | None = None
    """The attempt that this node's launcher has begun, which need not share rank 0's folder; None: no launcher."""
    beat: Callable[[], None] = lambda: None
    """Called whenever this rank has made progress: an update, a batch, a save."""
    keeper: KeeperLink | None = None
    """Link to this rank's keeper; None: it has none."""
    starting: Starting = field(default_factory=lambda: Starting(speaks=False, attempt=None))
    """Told what the start is at."""
    is_sampled: bool = False
    """The rank that has started this process, a script, samples the hardware."""


def hint_on_update(config: Config, threads: int = 0, cpus: int = 0) -> str:
    """Return what makes the first update slow: the compiler; on a CPU a single thread.

    Args:
        threads: threads of a rank that trains on the CPU, of ``cpus``; 0 on a GPU.
    """
    hints = []
    if config.train.compile != "off":
        hints.append(f"It compiles the model (train.compile={config.train.compile}).")
    if threads == 1 < cpus:
        hints.append(f"A rank uses 1 thread, but this machine has {cpus} CPUs: --cpus-per-task.")
    return " ".join(hints)
