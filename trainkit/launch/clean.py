"""Selection of runs, or parts of them, that `clean` moves to the trash, and the reasons why others stay."""

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trainkit.checkpoint import format
from trainkit.cluster.job_states import job_states
from trainkit.cluster.scheduler import JobState
from trainkit.common import fileio
from trainkit.common.errors import TrainkitError
from trainkit.run import find, folder, trash
from trainkit.run.folder import RunDir, sweep_of
from trainkit.run.history import RunHistory, history_of
from trainkit.run.labels import KEEP, labels_of
from trainkit.run.run_lease import Holder, is_written, lease_on
from trainkit.run.selection import Selection
from trainkit.run.snapshot import STORE

_OF_SWEEP = (
    *("sweep.json", folder.PRUNING, folder.SAMPLER, "plan.json", "submit.sbatch", ".submitit", "logs"),
    *(folder.LEASE.name, "report.html", "logbook.md", "results.md"),
)
_MOMENT_SECONDS = 60.0
"""Between the moment in which a run's folder is made and that in which its job is queued."""


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
    """Reason why nothing of it goes though that was asked for."""
    beside: Sequence[str] = ()
    """Names of the user's own files that stay in the folder of a sweep whose last run goes."""

    @property
    def is_whole(self) -> bool:
        return self.run.path in self.goes


class _Known(NamedTuple):
    history: RunHistory
    state: JobState


def planned(runs: Sequence[RunDir], wanted: Selection, env: Mapping[str, str], *, rule: str) -> list[Item]:
    """List the wanted ones of ``runs``, with the files that would go, and the reasons why some stay.

    Args:
        rule: ``whole``: the runs; ``spare``: what can be had again; ``best``: all checkpoints but the best;
            ``weights``: the optimizer's state of the best, too.
    """
    everything = {run.path: run for run in [*find.known_runs(env, everywhere=True), *runs]}
    known = _look_up(everything.values())
    code: dict[Path, list[Path]] = {}
    if rule == "spare":
        code = _spare_code(map(trash.root_of, runs), known)
    items = []
    for run in runs:
        state = JobState("UNKNOWN")
        why = "its record cannot be read"
        finished = False
        if run.path in known:
            state = known[run.path].state
            why = ""
            finished = known[run.path].history.finished
        try:
            if not (wanted.takes(run) and wanted.takes_state(state.state)):
                continue
            why = _why_it_stays(run, state) or why
        except TrainkitError as error:  # labels that cannot be read may say `keep`
            why = error.what.rstrip(".")
        parts = trash.parts_of(run)
        if rule == "whole":
            items.append(Item(run, state.state, parts, [run.path], sum(parts.values()), why))
            continue
        goes = [*_parts_that_go(run, rule, finished=finished), *code.get(run.path, ())]
        items.append(Item(run, state.state, parts, goes, sum(map(trash.size_of, goes)), why if goes else ""))
    going = {item.run.path for item in items if item.is_whole and not item.stays}
    needed = _needed(going, everything, known)
    for index, item in enumerate(items):
        stays = item.stays or needed.get(item.run.path, "")
        if item.goes and stays:
            items[index] = replace(item, goes=(), frees=0, stays=stays)
    return _with_sweeps(items)


def _parts_that_go(run: RunDir, rule: str, *, finished: bool) -> list[Path]:
    """List the checkpoints of a run, and its files for W&B, that go by a rule."""
    best_only = finished and rule != "spare"
    goes = _other_checkpoints(run, best_only=best_only, weights=rule == "weights")
    if rule == "spare" and finished and run.metrics.is_file() and not run.wandb.is_symlink():
        goes += run.wandb.glob("offline-run-*")  # `sync` sends the metrics
    return goes


def _with_sweeps(items: Sequence[Item]) -> list[Item]:
    """Add the sweep's own files to the last of the runs of a sweep that all go."""
    going = {item.run.path for item in items if item.is_whole}
    last = {sweep_of(item.run): index for index, item in enumerate(items) if item.is_whole}
    found = list(items)
    for sweep, index in last.items():
        if sweep is None or any(config.parent not in going for config in sweep.glob("*/config.yaml")):
            continue
        item = items[index]
        names = _names_of(sweep)
        own = []
        beside = []
        for path in sorted(set(sweep.iterdir()) - going):
            if path.name in names:
                own.append(path)
            else:
                beside.append(path.name)
        frees = item.frees + sum(map(trash.size_of, own))
        found[index] = replace(item, goes=[*item.goes, *own], frees=frees, beside=beside)
    return found


def _names_of(sweep: Path) -> set[str]:
    """Names of the files that trainkit writes into the folder of a sweep, beside its runs."""
    book = ""
    with suppress(OSError):
        book = fileio.read_text(sweep / "logbook.md")
    return {*_OF_SWEEP, *re.findall(r"\(([\w.-]+\.svg)\)", book)}


def clean(items: Sequence[Item]) -> list[Path]:
    """Move the files of ``items`` that go into the trash. Returns the heaps there.

    Raises UserError where something cannot be moved, or a run has got a writer since.
    """
    heaps: dict[Path, Path] = {}
    for item in items:
        run = item.run
        root = trash.root_of(run)
        heap = heaps.setdefault(root, trash.new_heap(root))
        with lease_on(run, Holder.me(), patience=0.0):
            best = format.pointed(run.checkpoints, "best")
            if not item.is_whole and best is not None and _path_of(run, "latest") in item.goes:
                format.point(run.checkpoints, "latest", best)  # first: it never names what is gone
            trash.throw_away(item.goes, root, heap)
        if run.path.parent != root:
            with suppress(OSError):  # something is in the sweep's folder: of the user's, or another run
                run.path.parent.rmdir()
    return list(heaps.values())


def _look_up(runs: Iterable[RunDir]) -> dict[Path, _Known]:
    """Read the records of runs, and ask for their states; without those that cannot be read."""
    histories: dict[RunDir, RunHistory] = {}
    for run in runs:
        with suppress(TrainkitError):
            histories[run] = history_of(run)
    found = {}
    states = job_states(list(histories), list(histories.values()))
    for run, state in zip(histories, states, strict=True):
        found[run.path] = _Known(histories[run], state)
    return found


def _why_it_stays(run: RunDir, state: JobState) -> str:
    """Say why a run must stay; empty if it may go. Raises UserError where its labels cannot be read."""
    if KEEP in labels_of(run).tags:
        return f"tagged {KEEP}"
    if state.alive == "yes":
        return f"it is {state.state}"
    if state.alive == "unknown":
        return "nobody can tell whether its job has ended"
    if is_written(run):
        return "a process writes it"
    if state.state == "NOT SUBMITTED" and time.time() - run.made() < _MOMENT_SECONDS:
        return "it was made just now, and may be about to be queued"
    if run.path.is_symlink():
        return "it is a link"
    return "" if fileio.is_own(run.path) else "it is another user's"


def _path_of(run: RunDir, name: str) -> Path | None:
    step = format.pointed(run.checkpoints, name)
    if step is None:
        return None
    return format.path_of(run.checkpoints, step)


def _other_checkpoints(run: RunDir, *, best_only: bool, weights: bool) -> list[Path]:
    """List all checkpoints but the best, and but the newest unless ``best_only``; none without a best one.

    Args:
        weights: of the best of a finished run, the files of the optimizer too: it can then not be prolonged.
    """
    best = _path_of(run, "best")
    if best is None or not best.is_dir() or run.checkpoints.is_symlink():
        return []
    kept = [best]
    if not best_only:
        kept += filter(None, [_path_of(run, "latest")])
    found = []
    for step in format.steps(run.checkpoints):
        path = format.path_of(run.checkpoints, step)
        if path not in kept:
            found.append(path)
    if weights and best_only and not best.is_symlink():
        found += best.glob("optimizer*.safetensors")
    return found


def _spare_code(roots: Iterable[Path], known: Mapping[Path, _Known]) -> dict[Path, list[Path]]:
    """Map the last of the runs that share unpacked code to it, if all have ended, and have an archive for `resume`."""
    users = defaultdict[Path, list[RunDir]](list)
    for root in dict.fromkeys(roots):
        for link in (*root.glob("*/code"), *root.glob("*/*/code")):
            copy = Path(os.path.realpath(link))
            if copy.parent.parent == root.resolve() and copy.parent.name.startswith(STORE) and fileio.is_own(copy):
                users[root / copy.relative_to(root.resolve())].append(RunDir(link.parent))
    found = defaultdict[Path, list[Path]](list)
    for copy, runs in users.items():
        if all(_has_ended(run, known.get(run.path)) for run in runs):
            found[runs[-1].path].append(copy)
    return found


def _has_ended(run: RunDir, known: _Known | None) -> bool:
    if known is None or known.history.outcome is None or known.state.alive != "no":
        return False
    return run.code_archive.is_file() and not is_written(run)


def _needed(going: set[Path], everything: Mapping[Path, RunDir], known: Mapping[Path, _Known]) -> dict[Path, str]:
    """Say why runs that would go are needed: a run that stays names their folder, or its job waits for theirs."""
    found: dict[Path, str] = {}
    for other in everything.values():
        if other.path in going:
            continue
        settings = ""
        with suppress(OSError):
            settings = fileio.read_text(other.config)
        waits: list[str] = []
        if other.path in known and known[other.path].state.alive != "no":
            waits = re.findall(r"\d+", other.directive("dependency"))
        for path in going - found.keys():
            if any(job.job_id.partition("_")[0] in waits for job in known[path].history.submissions):
                found[path] = f"the job of {other.name} waits for it"
            elif re.search(rf"{re.escape(str(path))}(?![\w.-])", settings):
                found[path] = f"{other.name} names it in its settings"
    return found
