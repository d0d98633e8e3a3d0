"""Filters for selecting runs by state, preset, tag and age, and the best of them by a metric."""

import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.common import fileio, jsonl
from trainkit.common.errors import UserError, did_you_mean, unknown
from trainkit.run import metrics, run_progress
from trainkit.run.folder import RunDir
from trainkit.run.labels import labels_of

_UNITS = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_GROUPS = {
    "failed": {"FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"},
    "running": {"RUNNING", "COMPLETING"},
    "queued": {"PENDING", "CONFIGURING", "REQUEUED"},
}
"""Words for several of SLURM's states."""
_STATES = {"CANCELLED", "COMPLETED", "PREEMPTED", "UNKNOWN", "NOT SUBMITTED"}.union(*_GROUPS.values())
_NO_PRESET_AFTER = ("--name", "--job-name", "-J", "--tag", "--note", "--cluster", "--run-dir")


@dataclass(frozen=True)
class Selection:
    """Runs that have all of this; what is not asked for is empty."""

    states: frozenset[str] = frozenset()
    """States as `states_in` returns them."""
    preset: str = ""
    tags: Sequence[str] = ()
    since: float | None = None
    """Seconds: made, or resumed, no longer ago than that."""
    older: float | None = None
    """Seconds: nothing of the run was written for so long."""

    def __bool__(self) -> bool:
        return self != Selection()

    def takes(self, run: RunDir) -> bool:
        """True if a run has all that its folder can tell; its state is asked of its scheduler. Raises UserError where
        its labels cannot be read."""
        now = time.time()
        return (
            (self.since is None or now - run.made() <= self.since)
            and (self.older is None or now - _touched(run) > self.older)
            and (not self.preset or self.preset in presets_of(run))
            and (not self.tags or set(self.tags) <= set(labels_of(run).tags))
        )

    def takes_state(self, state: str) -> bool:
        """True if a run of this state is meant."""
        return not self.states or state in self.states


def states_in(text: str) -> frozenset[str]:
    """SLURM's states in ``failed,PENDING``; `failed`, `running` and `queued` are several. Raises UserError."""
    found: set[str] = set()
    for word in text.split(","):
        name = word.strip().lower().replace("_", " ")
        of_state = {state for state in _STATES if state.lower().replace("_", " ") == name}
        states = _GROUPS.get(name, of_state)
        if not states:
            known = list(dict.fromkeys([*_GROUPS, *map(str.lower, sorted(_STATES))]))
            raise unknown("state", word, known, otherwise="Use --state failed.")
        found |= states
    return frozenset(found)


def seconds_in(text: str) -> float:
    """Seconds in ``90min``, ``12h``, ``7d`` or ``2w``. Raises UserError."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(min|h|d|w)", text.strip())
    if match is None:
        why = "It takes a number with a unit: min, h, d or w."
        raise UserError(f"'{text}' is not an age.", why=why, fix="For example 7d, 12h or 2w.")
    return float(match[1]) * _UNITS[match[2]]


def presets_of(run: RunDir) -> set[str]:
    """Return presets that the run's command line may have named, as a name and as a file; empty without a manifest."""
    command = fileio.read_object(run.manifest).get("command")
    found: set[str] = set()
    for before, given in itertools.pairwise(command[2:] if isinstance(command, list) else ()):
        word = str(given)
        if before not in _NO_PRESET_AFTER and not word.startswith("-") and "=" not in word:
            found |= {word, re.sub(r"\.ya?ml$", "", Path(word).name)}
    return found


def _touched(run: RunDir) -> float:
    """When something of the run was last written, in seconds since 1970."""
    times = [run.made()]
    for file in (run.events, run.metrics, run.summary):
        with suppress(OSError):
            times.append(file.lstat().st_mtime)
    return max(times)


# The best


def measured(run: RunDir, key: str) -> float | None:
    """Return a run's score by ``val/acc1``: of validations the best, of train and test the last; None without one.

    Args:
        key: split and metric; ``val`` alone is the headline of the run's task.

    Raises:
        UserError: there is no such split, or the record cannot be read.
    """
    split, name = _parts(key)
    of_task = metrics.task_metrics(run)
    name = name or of_task.headline
    by_step: dict[int, Any] = {}  # after a restart the newer one counts
    for raw in jsonl.read_jsonl(run.metrics, [f'"split": "{split}"'.encode()], most=metrics.MOST_BYTES):
        record = metrics.typed_record(raw, of_task)
        if record is not None and record["split"] == split:
            by_step[record["step"]] = record.get(name)
    if split == "test" and not by_step:
        by_step[0] = (metrics.best_evaluation(run) or {}).get(name)
    values = list(map(float, filter(jsonl.is_number, by_step.values())))
    if not values:
        return None
    if split != "val":
        return values[-1]
    best = max if is_higher_better(run, key) else min
    return best(values)


def is_higher_better(run: RunDir, key: str) -> bool:
    """The direction of a metric; of what is none, as images/s, more comes first."""
    of_task = metrics.task_metrics(run)
    metric = of_task.find(_parts(key)[1] or of_task.headline)
    return metric is None or metric.higher_is_better


def best_first(values: Mapping[RunDir, float | None], key: str) -> list[RunDir]:
    """Runs with what `measured` says of them, best first, then those without a value.

    Raises UserError where no run has one.
    """
    known: dict[RunDir, float] = {}
    unknown_runs: list[RunDir] = []
    for run, value in values.items():
        if value is None:
            unknown_runs.append(run)
        else:
            known[run] = -value if is_higher_better(run, key) else value
    if values and not known:
        there = sorted(set().union(*map(_keys_of, values)))
        why = f"There are: {', '.join(there) or 'no records yet'}."
        fix = did_you_mean(key, there, otherwise="Sort by one of these, or omit --sort.")
        raise UserError(f"No run here has measured {key}.", why=why, fix=fix)
    return [*sorted(known, key=known.__getitem__), *unknown_runs]


def _parts(key: str) -> tuple[str, str]:
    split, _, name = key.partition("/")
    if "/" not in key and key not in metrics.SPLITS:
        split = "val"
        name = key
    if split not in metrics.SPLITS:
        why = f"It takes SPLIT/METRIC, and a split is one of {', '.join(metrics.SPLITS)}."
        raise UserError(f"'{key}' cannot be sorted by.", why=why, fix="For example --sort val/acc1.")
    return split, name


def _keys_of(run: RunDir) -> Iterable[str]:
    progress = run_progress.progress_of(run)
    for record in (progress.val, progress.train):
        for name, value in record.items():
            if jsonl.is_number(value) and name not in ("time", "step", "epoch"):
                yield f"{record['split']}/{name}"
