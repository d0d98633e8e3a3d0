"""What all measurements have in common: arms that take turns, a control, and a figure that says what it is worth.

The first arm is the one to compare with. It is measured twice in each round, and the ratio of the two is the control:
what that is off, the machine is too busy to say anything, and the figure is void.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from trainkit.data.base import Batch, Splits

CONTROL = "control"
T = TypeVar("T")
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Figure:
    """A line of the table."""

    what: str
    figure: str
    control: float | None = None
    """The first arm to itself; None where nothing is compared."""
    goal: str = ""
    met: bool | None = None
    """None where there is no goal."""
    tolerance: float = 0.05
    """What the control may be off before the figure is void."""
    note: str = ""
    headline: str = ""
    """What it is called in docs/bench.md, if it is one of the few that are there."""

    @property
    def void(self) -> bool:
        return self.control is not None and not abs(self.control - 1) <= self.tolerance

    @property
    def verdict(self) -> str:
        """yes, no, void; with what there is to say about it."""
        word = "void" if self.void else {None: "", True: "yes", False: "no"}[self.met]
        return ": ".join(filter(None, (word, self.note)))

    def row(self, name: str) -> str:
        """In Markdown, of the measurement of this name."""
        control = "" if self.control is None else f"{self.control:.3f}"
        return f"| `{name}` | {self.what} | {self.figure} | {control} | {self.goal} | {self.verdict} |"

    def short_row(self) -> str:
        """In Markdown, for docs/bench.md."""
        return f"| {self.headline} | {self.figure} | {self.goal} | {self.verdict} |"


@dataclass(frozen=True)
class Table:
    """What takes more than one figure a line: a table of its own, and the goals below it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    goals: Sequence[Figure] = ()

    def lines(self) -> list[str]:
        """In Markdown."""
        cells = (self.head, ["---"] * len(self.head), *self.rows)
        goals = []
        for one in self.goals:
            verdict = f"; {one.goal}: {one.verdict}" if one.goal else ""
            goals.append(f"- {one.what}: {one.figure}{verdict}")
        return [*(f"| {' | '.join(row)} |" for row in cells), "", *goals]


def take_turns(arms: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each arm measured in each round, the first one under `CONTROL` as well; every other round goes backwards."""
    turns = [*arms.items(), (CONTROL, next(iter(arms.values())))]
    measured: dict[str, list[T]] = {name: [] for name, _ in turns}
    for number in range(rounds):
        for name, measure in turns if number % 2 == 0 else reversed(turns):
            measured[name].append(measure())
    return measured


Turn = Callable[[], None]


def side_by_side(
    arms: Mapping[str, Callable[[Turn], object]], clocks: Mapping[str, Callable[[], float]]
) -> dict[str, dict[str, list[float]]]:
    """Run the arms, each in a thread, of which one goes on at a time: clock -> arm -> what each of its turns took. The
    first arm has two threads, the other one's turns are under `CONTROL`.

    Turns can be as short as is measured well: so whatever else the machine does meanwhile, it does to all arms alike.
    None takes two turns in a row: the second would find the processor's caches full of its own, and be quicker. Every
    other round goes backwards but for its last arm, so that each comes as often after each of two others.

    Args:
        arms: each gets what it calls before its first turn and between two of them, all equally often. What is before
            the first call or after the last is not measured.
    """
    turns = [*arms.items(), (CONTROL, next(iter(arms.values())))]
    measured: dict[str, dict[str, list[float]]] = {clock: {name: [] for name, _ in turns} for clock in clocks}
    waiting = {name: threading.Semaphore(0) for name, _ in turns}
    done, alive, failed = threading.Semaphore(0), set(waiting), list[BaseException]()

    def run(name: str, arm: Callable[[Turn], object]) -> None:
        began: dict[str, float] = {}

        def turn() -> None:
            now = {clock: ask() for clock, ask in clocks.items()}
            for clock in began:
                measured[clock][name].append(now[clock] - began[clock])
            done.release()
            waiting[name].acquire()
            began.update({clock: ask() for clock, ask in clocks.items()})

        waiting[name].acquire()
        try:
            arm(turn)
        except BaseException as error:
            failed.append(error)
        alive.remove(name)
        done.release()

    for name, arm in turns:
        threading.Thread(target=run, args=(name, arm), daemon=True).start()
    order = [name for name, _ in turns]
    while alive:
        for name in order:
            if name in alive:
                waiting[name].release()
                done.acquire()
                if failed:
                    raise failed[0]
        order[:-1] = order[-2::-1]
    return measured


def ratios(measured: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Of an arm to the first one, round by round: to the mean of its two turns, but for the control."""
    first = next(iter(measured.values()))
    if name == CONTROL:
        return [other / one for one, other in zip(first, measured[CONTROL], strict=True)]
    both = [(one + other) / 2 for one, other in zip(first, measured[CONTROL], strict=True)]
    return [value / one for value, one in zip(measured[name], both, strict=True)]


def control_of(measured: Mapping[str, Sequence[float]]) -> float:
    """The median ratio of the first arm to itself."""
    return statistics.median(ratios(measured, CONTROL))


def against(
    measured: Mapping[str, Sequence[float]], name: str, *, what: str, at_most: float | None = None,
    at_least: float | None = None, faster: bool = False, shown: Callable[[float], str] = "{:.2f} s".format,
    tolerance: float = 0.05, note: str = "", headline: str = "",
) -> Figure:  # fmt: skip
    """An arm's ratio to the first one, or with ``faster`` how many times as fast it is; ``shown`` says in which words
    what both have measured."""
    values, form = ratios(measured, name), "{:.3f}"
    if faster:
        values, form = [1 / value for value in values], "{:.2f} x"
    first, own = (shown(statistics.median(measured[arm])) for arm in (next(iter(measured)), name))
    figure = f"{describe(values, form.format)}; {own}, against {first}"
    goal = ""
    met = None
    if at_most is not None:
        goal = f"at most {form.format(at_most)}"
        met = statistics.median(values) <= at_most
    elif at_least is not None:
        goal = f"at least {form.format(at_least)}"
        met = statistics.median(values) >= at_least
    return Figure(what, figure, control_of(measured), goal, met, tolerance, note, headline)


def describe(values: Sequence[float], shown: Callable[[float], str] = "{:.3f}".format) -> str:
    """Median, and all but a twentieth of the measurements; all of them if they are few."""
    ordered = sorted(values)
    spared = len(ordered) // 40
    low, high = ordered[spared], ordered[len(ordered) - 1 - spared]
    return f"{shown(statistics.median(ordered))} ({shown(low)} to {shown(high)}, {len(ordered)} rounds)"


def loaded(splits: Splits, first: int, last: int, batch: int, **more: Any) -> AbstractContextManager[Iterator[Batch]]:
    """The batches of ``batch`` images of these steps from the kit's loader, in this process and for one rank unless
    ``more`` says so."""
    from trainkit.data.loader import Loading, train_batches

    loading = Loading(**more)
    sizes = {"global_batch_size": batch * loading.world_size, "micro_batch_size": batch}
    return train_batches(splits, loading, seed=0, steps=range(first, last), **sizes)


def fast_folder(size: int) -> Path | None:
    """Where temporary files of so many bytes do not depend on a disk; None for the usual place, if there is no room."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > size else None


def cpu_seconds(work: Callable[[], object]) -> float:
    """That this process spends on it."""
    began = time.process_time()
    work()
    return time.process_time() - began


def wall_seconds(work: Callable[[], object]) -> float:
    """Until it returns."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
