"""What runs may be cleaned away, and why others stay: what `clean` shows, and does with ``--yes``."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit import fileio
from trainkit.checkpoint import format
from trainkit.errors import TrainkitError
from trainkit.run import folder, room
from trainkit.run.events import Holder, RunHistory, history_of, is_written, lease_on
from trainkit.run.folder import RunDir
from trainkit.run.labels import KEEP, labels_of
from trainkit.run.selection import Selection
from trainkit.run.snapshot import STORE
from trainkit.schedulers.base import JobState, job_states

_SOON_SECONDS = 60.0
"""Of training: what comes of going on from the best checkpoint is what came of it before."""


@dataclass(frozen=True)
class Item:
    """One run, as far as a command may clean it."""

    run: RunDir
    state: str
    parts: Mapping[str, int]
    goes: Sequence[Path] = ()
    """The run itself, or parts of it; unpacked code that it shares goes with the last of those that share it."""
    frees: int = 0
    """Bytes."""
    stays: str = ""
    """Why nothing of it goes though it was asked for; empty where it does, or was not."""

    @property
    def is_whole(self) -> bool:
        return self.run.path in self.goes


def planned(runs: Sequence[RunDir], wanted: Selection, env: Mapping[str, str], *, rule: str) -> list[Item]:
    """What would go of those of ``runs`` that are wanted, and what stays.

    Args:
        rule: ``whole``, ``spare``: what can be had again, ``best``: all checkpoints but the best go, ``weights``: and
            its optimizer's state.
    """
    everything = {run.path: run for run in [*folder.known_runs(env, everywhere=True), *runs]}
    lives, states = _asked(everything.values())
    items: list[Item] = []
    code = _spare_code(map(room.root_of, runs), lives, states) if rule == "spare" else {}
    for run in runs:
        state = states.get(run.path, JobState("UNKNOWN"))
        try:
            if not (wanted.takes(run) and wanted.takes_state(state.state)):
                continue
            why = _why_it_stays(run, state)
        except TrainkitError as error:  # labels that cannot be read may say `keep`
            why = error.what.rstrip(".")
        if run.path not in lives:
            why = why or "its record cannot be read"
        parts, goes = room.parts_of(run), list[Path]()
        if rule == "whole":
            goes = [run.path]
        else:
            finished = run.path in lives and lives[run.path].finished
            best_only = finished and (rule != "spare" or _makes_newest_again(run))
            goes = _other_checkpoints(run, best_only=best_only, weights=rule == "weights")
            if rule == "spare" and finished and run.metrics.is_file() and not run.wandb.is_symlink():
                goes += run.wandb.glob("offline-run-*")  # `sync` sends the metrics
            goes += code.get(run.path, ())
        frees = sum(parts.values()) if rule == "whole" else sum(map(room.size_of, goes))
        items.append(Item(run, state.state, parts, goes, frees, why if goes else ""))
    going = {item.run.path for item in items if item.is_whole and not item.stays}
    needed = _needed(going, everything, lives, states)
    stays = {item.run.path: item.stays or needed.get(item.run.path) for item in items if item.goes}
    return [replace(it, goes=(), frees=0, stays=said) if (said := stays.get(it.run.path)) else it for it in items]


def clean(items: Sequence[Item]) -> list[Path]:
    """Move what goes of these, each of which loses something, into the trash; the heaps there.

    Raises UserError where something cannot be moved, or a run has got a writer since.
    """
    heaps: dict[Path, Path] = {}
    for item in items:
        run, root = item.run, room.root_of(item.run)
        heap = heaps.setdefault(root, room.new_heap(root))
        with lease_on(run, Holder.me(), patience=0.0):
            best = format.pointed(run.checkpoints, "best")
            if not item.is_whole and best is not None and _path_of(run, "latest") in item.goes:
                format.point(run.checkpoints, "latest", best)  # first: it never names what is gone
            room.throw_away(item.goes, root, heap)
        sweep = run.path.parent
        if item.is_whole and sweep != root and not any(sweep.glob("*/config.yaml")):  # it was the last of them
            room.throw_away(list(sweep.iterdir()), root, heap)
            sweep.rmdir()
    return list(heaps.values())


def _asked(runs: Iterable[RunDir]) -> tuple[dict[Path, RunHistory], dict[Path, JobState]]:
    """The records and the states of all runs that can be read."""
    lives: dict[Path, RunHistory] = {}
    for run in runs:
        with suppress(TrainkitError):
            lives[run.path] = history_of(run)
    states = job_states(list(map(RunDir, lives)), list(lives.values()))
    return lives, dict(zip(lives, states, strict=True))


def _why_it_stays(run: RunDir, state: JobState) -> str:
    """Raises UserError where its labels cannot be read."""
    if KEEP in labels_of(run).tags:
        return f"tagged {KEEP}"
    if state.alive == "yes":
        return f"it is {state.state}"
    if state.alive == "unknown":
        return "nobody can tell whether its job has ended"
    if is_written(run):
        return "a process writes it"
    if not fileio.is_own(run.path):
        return "it is a link" if run.path.is_symlink() else "it is another user's"
    return ""


def _path_of(run: RunDir, name: str) -> Path | None:
    step = format.pointed(run.checkpoints, name)
    return format.path_of(run.checkpoints, step) if step is not None else None


def _makes_newest_again(run: RunDir) -> bool:
    """Whether the best checkpoint is whole, and a moment's training from there makes the newest again."""
    best, newest = (format.pointed(run.checkpoints, name) for name in ("best", "latest"))
    told = fileio.read_object(run.summary)
    seconds, steps = told.get("train_seconds"), told.get("steps")
    if best is None or newest is None or not (fileio.is_number(seconds) and fileio.is_whole(steps) and steps):
        return False
    with suppress(format.BrokenCheckpointError):
        if (newest - best) / steps * seconds <= _SOON_SECONDS:
            return format.verified(run.checkpoints, best).stems == format.described(run.checkpoints, newest).stems
    return False


def _other_checkpoints(run: RunDir, *, best_only: bool, weights: bool) -> list[Path]:
    """All but the best, and but the newest unless ``best_only``; none without a best one.

    Args:
        weights: of the best of a finished run, the files of the optimizer too: it can then not be prolonged.
    """
    kept = {best := _path_of(run, "best"), None if best_only else _path_of(run, "latest")}
    if best is None or not best.is_dir() or run.checkpoints.is_symlink():
        return []
    there = [format.path_of(run.checkpoints, step) for step in format.steps(run.checkpoints)]
    states = best.glob("optimizer*.safetensors") if weights and best_only and not best.is_symlink() else ()
    return [*(path for path in there if path not in kept), *states]


def _spare_code(
    roots: Iterable[Path], lives: Mapping[Path, RunHistory], states: Mapping[Path, JobState]
) -> dict[Path, list[Path]]:
    """Unpacked code by the last of the runs that share it: all have ended, and have an archive of it for `resume`."""
    users = defaultdict[Path, list[RunDir]](list)
    for root in dict.fromkeys(roots):
        for link in (*root.glob("*/code"), *root.glob("*/*/code")):
            copy = Path(os.path.realpath(link))
            if copy.parent.parent == root.resolve() and copy.parent.name.startswith(STORE) and fileio.is_own(copy):
                users[root / copy.relative_to(root.resolve())].append(RunDir(link.parent))

    def has_ended(run: RunDir) -> bool:
        known = run.path in lives and lives[run.path].outcome is not None and run.code_archive.is_file()
        return known and states[run.path].alive == "no" and not is_written(run)

    found = defaultdict[Path, list[Path]](list)
    for copy, runs in users.items():
        if all(map(has_ended, runs)):
            found[runs[-1].path].append(copy)
    return found


def _needed(
    going: set[Path], everything: Mapping[Path, RunDir], lives: Mapping[Path, RunHistory],
    states: Mapping[Path, JobState],
) -> dict[Path, str]:  # fmt: skip
    """Why runs that would go are needed: a run that stays names their folder, or its job waits for theirs."""
    found: dict[Path, str] = {}
    for other in (run for path, run in everything.items() if path not in going):
        settings, waits = "", set[str]()
        with suppress(OSError):
            settings = fileio.read_text(other.config)
        if other.path in states and states[other.path].alive != "no":
            waits = set(re.findall(r"\d+", other.directive("dependency")))
        for path in going - found.keys():
            jobs = {job.job_id.partition("_")[0] for job in lives[path].submissions}
            if waits & jobs:
                found[path] = f"the job of {other.name} waits for it"
            elif re.search(rf"{re.escape(str(path))}(?![\w.-])", settings):
                found[path] = f"{other.name} names it in its settings"
    return found
