"""A run is a folder, and it is complete: `RunDir` knows its file names."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.run.user_lists import remember

_BEFORE_A_RUN = {"logs", "events.jsonl"}
"""Names that a job may write into a folder that is not a run yet."""


@dataclass(frozen=True)
class Message:
    """A file by which processes of a run tell one another something.

    A message counts while its file is there; what is to be remembered is an event (`trainkit.run.events`). It is
    complete or absent, and one that cannot be read is passed over, for a stranger may have written it.
    """

    name: str
    """``{}`` stands for the number of a rank or a node."""

    def at(self, folder: Path, number: int | None = None) -> Path:
        """Its file in a run's folder, or in the log folder of an attempt."""
        return folder / self.name.format(number)

    def send(
        self, folder: Path, content: str | Mapping[str, Any], number: int | None = None, *, within: Path | None = None
    ) -> None:
        """Write it: a line of text, or a JSON object. ``within``: the run's folder, where ``folder`` is below it."""
        text = f"{content}\n" if isinstance(content, str) else json.dumps(content)
        fileio.write(self.at(folder, number), text, within or folder)

    def read(self, folder: Path, number: int | None = None) -> str:
        """Its text; empty where there is none that can be read."""
        try:
            return fileio.read_text(self.at(folder, number)).strip()
        except OSError:
            return ""


# In a run's folder
LEASE = Message("lease.json")
PROFILE = Message("PROFILE")
REMOTE = Message("remote.json")
SWARM = Message("swarm.json")
SWARM_IDENTITY = Message("swarm_identity")
SWARM_ADDRESS = Message("swarm_address")
BENCH = Message("bench.json")
LAB = Message("lab.json")
# In the log folder of an attempt
CLAIM = Message("node-{}")
NODES = Message("nodes")
REQUEUE = Message("requeue")
OVER = Message("over")
PREFLIGHT = Message("preflight.json")
LOST = Message("lost")
HANG = Message("rank-{}.hang")
HANG_LIMIT = Message("hang-limit.json")
PRUNED = Message("pruned")
MESSAGES = [item for item in tuple(vars().values()) if isinstance(item, Message)]


LISTED = "`python -m jobs.status` lists the runs."
_NUMBER = re.compile(r"[0-9]{1,9}")


class Below:
    """A file or a folder below a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. ``path`` is absolute."""

    path: Path

    config = Below("config.yaml")
    plan = Below("plan.json")
    script = Below("submit.sbatch")
    manifest = Below("manifest.json")
    code = Below("code")
    """Code that the job runs: a link to the copy in ``../.code`` of all runs of equal code, or a folder of its own."""
    code_archive = Below("code.zip")
    """The run's own copy of its code, by which it is complete without the shared one."""
    logs = Below("logs")
    submitit = Below(".submitit")
    """submitit's own files: the pickle with one path in it, and the results of the tasks."""
    metrics = Below("metrics.jsonl")
    task = Below("task.json")
    """The metrics in `metrics`: unit, direction and label of each."""
    contributions = Below("contributions.json")
    """Contributions to a collaborative run, by name."""
    evaluations = Below("evaluations.jsonl")
    """Measurements of checkpoints by `evaluate`; `metrics` is the training's alone."""
    events = Below("events.jsonl")
    labels = Below("labels.jsonl")
    """Tags and notes by the user."""
    lease = Below(LEASE.name)
    """The present writer, while there is one."""
    checkpoints = Below("checkpoints")
    tensorboard = Below("tensorboard")
    wandb = Below("wandb")
    summary = Below("summary.json")
    confusion = Below("confusion.json")
    """Confusion matrix of the best weights."""
    profile = Below("profile")
    """Traces of the profiler, and what memory held when there was too little of it."""
    profile_request = Below(PROFILE.name)
    """Request for a profile of the next updates, by making this file."""

    @property
    def name(self) -> str:
        """For people. A stranger's folder may have a name that a terminal obeys."""
        return terminal.one_line(self.path.name)

    def mistakes(self, split: str) -> Path:
        """The images of a split that the best weights told wrong, and were surest of."""
        return self.path / f"mistakes-{split}.json"

    def hardware(self, host: str) -> Path:
        """Hardware samples of one host."""
        return self.path / f"system-{host}.jsonl"

    def attempt_logs(self, attempt: int) -> Path:
        """Log folder of one attempt: ``rank-<n>.out`` and ``rank-<n>.err``."""
        return self.logs / str(attempt)

    def attempts(self) -> list[int]:
        """Numbers of the attempts that have started, in order."""
        found: list[int] = []
        with suppress(OSError), os.scandir(self.logs) as entries:
            for entry in entries:
                if _NUMBER.fullmatch(entry.name) and entry.is_dir():
                    found.append(int(entry.name))
        return sorted(found)

    def directive(self, name: str) -> str:
        """Return the value of an sbatch option in its plan; empty if there is none."""
        given = fileio.read_object(self.plan).get("directives")
        for item in given if isinstance(given, list) else ():
            if isinstance(item, dict) and item.get("name") == name:
                return str(item.get("value"))
        return ""

    def made(self) -> float:
        """When it was made, or resumed: seconds since 1970; 0 for one that is just being removed."""
        try:
            return self.config.stat().st_mtime
        except OSError:
            return 0.0

    @classmethod
    def create(cls, path: Path, config_yaml: str, *, after_logs: bool = False) -> RunDir:
        """Make the folder of a new run, which is one as soon as it holds its configuration.

        Args:
            after_logs: the folder may be there with what a job writes before its run is made: the logs of its ranks,
                and events such as that a node was lost.

        Raises:
            UserError: something of that name exists, or the folder cannot be written.
        """
        path = path.absolute()
        made = False
        try:
            if after_logs and path.is_dir() and set(os.listdir(path)) <= _BEFORE_A_RUN:
                path.chmod(_mode())
            else:
                make_private(path)
                made = True
            fileio.make_folder(path / "logs", path)
            fileio.write(path / "config.yaml", config_yaml, path)
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.lexists(path):  # not a broken link on the way there
                fix = "Give another --name or --run-dir, or continue that one with `python -m jobs.resume`."
                raise UserError(f"{path} exists already.", why="A run is never overwritten.", fix=fix) from None
            if made:
                shutil.rmtree(path, ignore_errors=True)
            why = f"{error.strerror}: {error.filename}"
            fix = "Name a folder that you can write to with TRAINKIT_RUNS=FOLDER or --run-dir, or free some space."
            raise UserError(f"Cannot make the run folder {path}.", why=why, fix=fix) from None
        remember(path)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run folder. Raises UserError: there is none, or it is half-written."""
        path = path.absolute()
        run_dir = cls(path)
        try:
            is_run = stat.S_ISREG(run_dir.config.stat().st_mode)
        except PermissionError:
            raise closed(path) from None
        except (OSError, ValueError):  # also a name that no file can have
            is_run = False
        if not is_run and not os.path.isdir(path):
            raise UserError(f"No run folder {path}.", why="There is nothing there.", fix=LISTED)
        if not is_run:
            raise _without_config(run_dir)
        if run_dir.config.is_symlink():
            why = "It may lead to any file of yours, and files of a run are shown and sent."
            raise UserError(f"{run_dir.config} is a link.", why=why, fix="Put the file itself there.")
        return run_dir


def _without_config(run: RunDir) -> UserError:
    """The error for a folder without config.yaml. Nobody is told to remove it: its job may live."""
    what = f"{run.path} is not a run folder, or an incomplete one."
    fix = LISTED
    attempts = run.attempts()
    if is_sweep(run.path):
        fix = f"It is a sweep: name one of its runs, such as {run.path.name}/0."
    elif attempts:
        what = f"{run.path} is not a run yet: its job is starting, or died before it started."
        fix = "If its job is alive, ask again in a moment; if it has ended, start it again. "
        fix += f"The ranks write to {run.attempt_logs(attempts[-1])}."
    return UserError(what, why="It has no config.yaml.", fix=fix)


def make_private(folder: Path, *, exist_ok: bool = False) -> None:
    """Make a folder that only the user can enter, or whom ``$TRAINKIT_RUN_MODE`` (octal, as for chmod: 750) lets in.

    Folders above it that are not there are made too, and nobody else can write there: who can, replaces the run.
    """
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o755, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not exist_ok:
            raise
        return
    try:
        folder.chmod(_mode())
    except (OSError, UserError):  # some disks have no modes
        folder.rmdir()
        raise


@contextmanager
def as_open_as(run: Path) -> Iterator[None]:
    """Make files of this process and its children as open as the run, by whatever library, in the block."""
    before = os.umask(umask_of(run))
    try:
        yield
    finally:
        os.umask(before)


def umask_of(run: Path) -> int:
    """The umask of a process that works for a run; of one that is not there yet, it is that of `make_private`."""
    return ~(stat.S_IMODE(run.stat().st_mode) if run.is_dir() else _mode()) & 0o777


def run_at(folder: Path) -> Path | None:
    """The folder if it is that of a run or of a sweep: what is written there is as open as the run."""
    return folder if is_sweep(folder) or (folder / "config.yaml").is_file() else None


def _mode() -> int:
    text = os.environ.get("TRAINKIT_RUN_MODE") or "700"
    if not re.fullmatch(r"[0-2]?7[0-7][0-7]", text):
        raise UserError(
            f"TRAINKIT_RUN_MODE={text} is not a mode with which you can write.",
            why="It takes a mode as chmod does, with all rights for yourself.",
            fix="Use 700 (only you), 750 (your group reads), 2770 (your group writes), or omit it.",
        )
    return int(text, 8)


PRUNING = "prune.json"
"""In the folder of a sweep whose runs stop where they are behind the others."""
SAMPLER = "sampler.json"
"""In the folder of a sweep whose runs are given their settings when they begin."""


def is_sweep(folder: Path) -> bool:
    """True if it is the folder of a sweep, whose runs are its folders 0, 1, 2, ..."""
    return os.path.isfile(folder / "sweep.json")


def sweep_of(run: RunDir) -> Path | None:
    """The folder of the sweep that a run is of, by its number; None for a run alone."""
    sweep = run.path.parent
    return sweep if _NUMBER.fullmatch(run.path.name) and is_sweep(sweep) else None


def closed(path: Path) -> UserError:
    """The error for a folder or a file that this user may not read."""
    try:
        whose = f"It belongs to {path.owner()} (mode {stat.S_IMODE(path.stat().st_mode):o})."
    except KeyError:  # this machine has no name for that user
        whose = f"It belongs to user {path.stat().st_uid}."
    except OSError:
        whose = "You may not enter a folder on this path."
    return UserError(
        f"Permission denied: {path}.",
        why=whose,
        fix="Ask its owner: `chmod 750` opens it to their group; TRAINKIT_RUN_MODE=750 does so for new runs.",
    )


class BenchDir(RunDir):
    """The folder of a bench: that of a run, with files of its own."""

    request = Below(BENCH.name)
    samples = Below("samples.jsonl")
    """Measurements, a line a turn."""
    results = Below("results.json")
    picture = Below("bench.svg")
    report = Below("proof.md")
    """Page of a proof, to be sent to others."""


def refuse_bench(path: Path) -> None:
    """Raises UserError for the folder of a bench: no training goes on in it, and none repeats it."""
    bench = BenchDir(path.absolute())
    if bench.request.exists():
        raise UserError(
            f"{bench.name} is a bench, which cannot be continued.",
            why="Turns of other times or other nodes cannot be compared.",
            fix=f"`{terminal.command('bench', '--show', bench.path)}` shows its results; start another bench.",
        )
