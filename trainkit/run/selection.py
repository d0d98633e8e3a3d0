"""Which runs a user means: by state, preset, tag and age; and which of them are the best by a metric."""

import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainkit import fileio
from trainkit.errors import UserError, did_you_mean, unknown
from trainkit.run import metrics
from trainkit.run.folder import RunDir
from trainkit.run.labels import labels_of

_UNITS = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_GROUPS = {
    "failed": {"FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"},
    "running": {"RUNNING", "COMPLETING"},
    "queued": {"PENDING", "CONFIGURING", "REQUEUED"},
}
"""Words for several of SLURM's states."""
_STATES = {
    state.replace("_", " "): state
    for state in ("CANCELLED", "COMPLETED", "PREEMPTED", "UNKNOWN", "NOT SUBMITTED", *set().union(*_GROUPS.values()))
}
_NO_PRESET_AFTER = ("--name", "--job-name", "-J", "--tag", "--note", "--cluster", "--run-dir")


@dataclass(frozen=True)
class Selection:
    """Runs that have all of this; what is not asked for is empty."""

    states: frozenset[str] = frozenset()
    """As `states_in` returns them."""
    preset: str = ""
    tags: Sequence[str] = ()
    since: float | None = None
    """Seconds: made, or resumed, no longer ago than that."""
    older: float | None = None
    """Seconds: nothing of the run was written for so long."""

    def __bool__(self) -> bool:
        return self != Selection()

    def takes(self, run: RunDir) -> bool:
        """Whether a run has all that its folder can tell; its state is asked of its scheduler. Raises UserError where
        its labels cannot be read."""
        now = time.time()
        return (
            (self.since is None or now - run.made() <= self.since)
            and (self.older is None or now - _touched(run) > self.older)
            and (not self.preset or self.preset in presets_of(run))
            and (not self.tags or set(self.tags) <= set(labels_of(run).tags))
        )

    def takes_state(self, state: str) -> bool:
        """Whether a run of this state is meant."""
        return not self.states or state in self.states


def states_in(text: str) -> frozenset[str]:
    """SLURM's states in ``failed,PENDING``; `failed`, `running` and `queued` are several. Raises UserError."""
    found: set[str] = set()
    for word in text.split(","):
        name = word.strip().upper().replace("_", " ")
        if name.lower() not in _GROUPS and name not in _STATES:
            known = list(dict.fromkeys([*_GROUPS, *sorted(state.lower() for state in _STATES.values())]))
            raise unknown("state", word, known, otherwise="Use --state failed.")
        found |= _GROUPS.get(name.lower(), {_STATES.get(name, "")})
    return frozenset(found)


def seconds_in(text: str) -> float:
    """Seconds in ``90min``, ``12h``, ``7d`` or ``2w``. Raises UserError."""
    if (match := re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(min|h|d|w)", text.strip())) is None:
        why = "An age is a number with its unit: min, h, d or w."
        raise UserError(f"'{text}' is no age.", why=why, fix="For example 7d, 12h or 2w.")
    return float(match[1]) * _UNITS[match[2]]


def presets_of(run: RunDir) -> set[str]:
    """What the run's command line may have named as its preset, as a name and as a file; empty without a manifest."""
    command = fileio.read_object(run.manifest).get("command")
    words = [str(word) for word in command[2:]] if isinstance(command, list) else []
    pairs = itertools.pairwise(words)
    named = [word for before, word in pairs if before not in _NO_PRESET_AFTER and not word.startswith("-")]
    plain = [word for word in named if "=" not in word]
    return {*plain, *(Path(word).stem for word in plain if word.endswith((".yaml", ".yml")))}


def _touched(run: RunDir) -> float:
    """When something of the run was last written, in seconds since 1970."""
    times = [run.made()]
    for file in (run.events, run.metrics, run.summary):
        with suppress(OSError):
            times.append(file.lstat().st_mtime)
    return max(times)


# The best


def measured(run: RunDir, key: str) -> float | None:
    """What a run has come to by ``val/acc1``: of validations the best, of train and test the last; None without one.

    Args:
        key: split and metric; ``val`` alone is the headline of the run's task.

    Raises:
        UserError: there is no such split, or the record cannot be read.
    """
    split, name = _parts(key)
    of_task = metrics.described(run)
    name = name or of_task.headline
    raw = fileio.read_jsonl(run.metrics, [f'"split": "{split}"'.encode()], most=metrics.MOST_BYTES)
    records = [record for item in raw if (record := metrics.typed_record(item, of_task)) and record["split"] == split]
    if split == "test" and not records and (evaluated := metrics.best_evaluation(run)):
        records = [evaluated]
    by_step = {record["step"]: record.get(name) for record in records}  # after a restart the newer one counts
    values = [float(value) for value in by_step.values() if fileio.is_number(value)]
    if split != "val" or not values:
        return values[-1] if values else None
    return max(values) if is_higher_better(run, key) else min(values)


def is_higher_better(run: RunDir, key: str) -> bool:
    """The direction of a metric; of what is none, as images/s, more comes first."""
    of_task = metrics.described(run)
    metric = of_task.find(_parts(key)[1] or of_task.headline)
    return metric is None or metric.higher_is_better


def best_first(values: Mapping[RunDir, float | None], key: str) -> list[RunDir]:
    """Runs with what `measured` says of them, best first, then those without a value.

    Raises UserError where no run has one.
    """
    known = {run: value for run, value in values.items() if value is not None}
    if values and not known:
        there = sorted(set().union(*(_keys_of(run) for run in values)))
        why = f"There are: {', '.join(there) or 'no records yet'}."
        fix = did_you_mean(key, there, otherwise="Sort by one of these, or leave --sort out.")
        raise UserError(f"No run here has measured {key}.", why=why, fix=fix)
    ranked = sorted(known, key=lambda run: -known[run] if is_higher_better(run, key) else known[run])
    return [*ranked, *(run for run in values if run not in known)]


def _parts(key: str) -> tuple[str, str]:
    split, _, name = key.partition("/") if key in metrics.SPLITS or "/" in key else ("val", "", key)
    if split not in metrics.SPLITS:
        why = f"What is measured is called SPLIT/METRIC, and a split is one of {', '.join(metrics.SPLITS)}."
        raise UserError(f"'{key}' is nothing to sort by.", why=why, fix="For example --sort val/acc1.")
    return split, name


def _keys_of(run: RunDir) -> Iterable[str]:
    progress = metrics.progress_of(run)
    for split, record in (("val", progress.val), ("train", progress.train)):
        yield from (f"{split}/{name}" for name, it in record.items() if name not in ("time", "step", "split", "epoch")
                    and fileio.is_number(it))  # fmt: skip
