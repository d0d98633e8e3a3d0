"""A run is a folder, and it is complete: `RunDir` knows its file names, `find_run` the runs that a user names.

A `Message` is a file in that folder by which the processes of a run talk to each other; docs/reference/files.md says
what is in each of them.

The runs that this user has started are listed in their state folder, so that `status`, `logs` and `cancel` find them
from any folder. The lists hold paths only: what a run is doing is asked from its folder and its scheduler. Each
installation of trainkit (a clone, an environment) has a list of its own: two clones are two projects.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.errors import UserError, did_you_mean


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
SWARM_CODE = Message("swarm_code.zip")
BENCH = Message("bench.json")
# In the log folder of an attempt
CLAIM = Message("node-{}")
NODES = Message("nodes")
REQUEUE = Message("requeue")
PREFLIGHT = Message("preflight.json")
HANG = Message("rank-{}.hang")
MESSAGES = [item for item in tuple(vars().values()) if isinstance(item, Message)]


# The lists of this user's runs


LISTED = "`python -m jobs.status` lists the runs."
_NUMBER = re.compile(r"[0-9]{1,9}")


def state_file(name: str = "runs") -> Path:
    """A file of this user's, on whatever machine shares their home."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "trainkit" / name


def own_file(name: str) -> Path:
    """A file of this installation's."""
    project = Path(__file__).resolve().parents[2]
    digest = hashlib.blake2b(os.fsencode(project), digest_size=4).hexdigest()
    return state_file("projects") / f"{project.name}-{digest}" / name


def make_state_folder(folder: Path) -> None:
    """Make a folder of `state_file` where it is not there; nobody else may write there, or a run of theirs would pass
    for the user's own."""
    root = state_file().parent
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_mode & 0o022:
        root.chmod(0o700)
    fileio.make_folder(folder, root)


def remember(path: Path) -> None:
    """Add a run folder to the list. A home that cannot be written costs only the convenience, so it is no error."""
    _append(own_file("runs"), str(path))


def mark(path: Path, fingerprint: str) -> None:
    """Note what a run is made of, so that another of the same is found without a look into every folder."""
    _append(own_file("fingerprints"), f"{fingerprint} {path}")


def marked() -> list[tuple[str, Path]]:
    """Fingerprint and folder of every run that was marked, oldest first; the folder may be gone."""
    pairs = (line.partition(" ") for line in _lines(own_file("fingerprints")))
    return [(mark, Path(path)) for mark, _, path in pairs if path.startswith("/")]


def note_job(path: Path, executor: str, job_id: str, process: str) -> None:
    """Note that this user has started a job or a process for a run: what its folder says of that, others may write."""
    _append(state_file("jobs"), _job_line(path, executor, job_id, process))


def has_started(path: Path, executor: str, job_id: str, process: str) -> bool:
    """Whether that was noted."""
    return _job_line(path, executor, job_id, process) in _lines(state_file("jobs"), private=True)


def _job_line(path: Path, executor: str, job_id: str, process: str) -> str:
    return f"{executor} {job_id} {process or '-'} {os.path.realpath(path)}"


def vouch(seals: Sequence[str]) -> None:
    """Note digests of code and settings that this user has submitted (`trainkit.run.ownership`)."""
    for seal in dict.fromkeys(seals).keys() - vouched():
        _append(state_file("vouched"), seal)


def vouched() -> frozenset[str]:
    """Those digests."""
    return frozenset(_lines(state_file("vouched"), private=True))


def known(*, everywhere: bool = False) -> list[Path]:
    """Run folders that were remembered and still exist, oldest first; ``everywhere``: by other installations too."""
    return [path for path in _remembered(everywhere=everywhere) if os.path.isfile(path / "config.yaml")]


def named(reference: str) -> list[Path]:
    """Folders of the runs and sweeps of that name, ``SWEEP/NUMBER`` included: those of this installation, or where it
    has none those of others."""
    for everywhere in (False, True):
        found: dict[Path, None] = {}
        for run in known(everywhere=everywhere):
            names = {run.name: run}
            if run.name.isdecimal():  # of a sweep, or a run whose name is a number
                names = {run.parent.name: run.parent} if is_sweep(run.parent) else names
                names[f"{run.parent.name}/{run.name}"] = run
            if reference in names:
                found[names[reference]] = None
        if found:
            return list(found)
    return []


def has(path: Path) -> bool:
    """Whether a command of this user made the run in ``path``, by whatever name the folder is reached."""
    real = os.path.realpath(path)
    names = (path.name, os.path.basename(real))  # few are asked of the file system
    remembered = _remembered(everywhere=True, private=True)
    return any(item.name in names and os.path.realpath(item) == real for item in remembered)


def _remembered(*, everywhere: bool, private: bool = False) -> list[Path]:
    # The first list was that of all installations until each had its own.
    files = [state_file(), *sorted(state_file("projects").glob("*/runs"))] if everywhere else [own_file("runs")]
    lines = dict.fromkeys(line for file in files for line in _lines(file, private=private))
    return [Path(line) for line in lines if line.startswith("/")]


def _append(file: Path, line: str) -> None:
    if "\n" in line:  # one a line
        return
    try:
        make_state_folder(file.parent)
        with fileio.append(file, file.parent) as out:
            os.fchmod(out.fileno(), 0o600)  # of lists that are there already, too
            out.write(os.fsencode(f"{line}\n"))
    except (OSError, UserError):
        return


def _lines(file: Path, *, private: bool = False) -> list[str]:
    """Its lines; ``private``: none if somebody else can have written it."""
    try:
        found = file.stat()
        if private and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            return []
        return list(dict.fromkeys(fileio.read_end(file).splitlines()))
    except OSError:
        return []


# One run


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
    """What the job runs: a link to the copy in ``../.code`` of all runs of equal code, or a folder of its own."""
    code_archive = Below("code.zip")
    """The run's own copy of its code, by which it is complete without the shared one."""
    logs = Below("logs")
    submitit = Below(".submitit")
    """submitit's own files: the pickle with one path in it, and the results of the tasks."""
    metrics = Below("metrics.jsonl")
    task = Below("task.json")
    """The metrics in `metrics`: unit, direction and label of each."""
    contributions = Below("contributions.json")
    """What was contributed to a collaborative run, by name."""
    evaluations = Below("evaluations.jsonl")
    """What `evaluate` has measured of checkpoints: `metrics` is the training's alone."""
    events = Below("events.jsonl")
    labels = Below("labels.jsonl")
    """What a user says of it: tags and notes."""
    lease = Below(LEASE.name)
    """Who may write, while somebody does."""
    checkpoints = Below("checkpoints")
    tensorboard = Below("tensorboard")
    wandb = Below("wandb")
    summary = Below("summary.json")
    confusion = Below("confusion.json")
    """Which class the best weights take for which."""
    profile = Below("profile")
    """Traces of the profiler, and what memory held when there was too little of it."""
    profile_request = Below(PROFILE.name)
    """Who makes this file asks for a profile of the next updates."""

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
        try:
            with os.scandir(self.logs) as entries:
                return sorted(int(entry.name) for entry in entries if _NUMBER.fullmatch(entry.name) and entry.is_dir())
        except OSError:
            return []

    def directive(self, name: str) -> str:
        """What its plan says that sbatch was given for an option; empty if nothing."""
        given = fileio.read_object(self.plan).get("directives")
        items = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
        return next((str(item.get("value")) for item in items if item.get("name") == name), "")

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
            after_logs: the folder may be there with nothing but ``logs/`` in it, as a plain sbatch script leaves it:
                srun opens the ranks' logs before any Python runs.

        Raises:
            UserError: something of that name exists, or the folder cannot be written.
        """
        path, made = path.absolute(), False
        try:
            if after_logs and path.is_dir() and os.listdir(path) == ["logs"]:
                path.chmod(_mode())
            else:
                make_private(path)
                made = True
            fileio.make_folder(path / "logs", path)
            fileio.write(path / "config.yaml", config_yaml, path)
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.lexists(path):  # not a broken link on the way there
                fix = "Give another --run-dir, or continue that one with `python -m jobs.resume`."
                raise UserError(f"{path} exists already.", why="A run is never written over.", fix=fix) from None
            if made:
                shutil.rmtree(path, ignore_errors=True)
            why = f"{error.strerror}: {error.filename}"
            fix = "Choose a folder that you may write to with TRAINKIT_RUNS=FOLDER or --run-dir, or free some space."
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
            half = any(os.path.exists(path / name) for name in ("logs", "code", "events.jsonl"))
            fix = f"{LISTED}{' Remove this folder if nothing in it is needed.' * half}"
            if is_sweep(path):
                fix = f"It is a sweep: name one of its runs, such as {path.name}/0."
            raise UserError(f"{path} is not a run folder, or only half of one.", why="It has no config.yaml.", fix=fix)
        if run_dir.config.is_symlink():
            why = "It may lead to any file of yours, and what a run says of itself is shown and sent."
            raise UserError(f"{run_dir.config} is a link.", why=why, fix="Put the file itself there.")
        return run_dir


def make_private(folder: Path, *, exist_ok: bool = False) -> None:
    """Make a folder that only the user can enter, or whom ``$TRAINKIT_RUN_MODE`` (octal, as for chmod: 750) lets in.

    Folders above it that are not there are made too, and nobody else can write there: who can, replaces the run.
    """
    for above in reversed([parent for parent in folder.parents if not parent.exists()]):
        above.mkdir(mode=0o755, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not exist_ok:
            raise
    else:
        try:
            folder.chmod(_mode())
        except (OSError, UserError):  # some disks have no modes
            folder.rmdir()
            raise


@contextmanager
def as_open_as(run: Path) -> Iterator[None]:
    """What this process and its children write in the block, by whatever library, is as open as the run."""
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
    return folder if any((folder / name).is_file() for name in ("config.yaml", "sweep.json")) else None


def _mode() -> int:
    text = os.environ.get("TRAINKIT_RUN_MODE") or "700"
    if not re.fullmatch(r"[0-2]?7[0-7][0-7]", text):
        raise UserError(
            f"TRAINKIT_RUN_MODE={text} is no mode for a folder that you write to.",
            why="It is written as for chmod, and you have all rights yourself.",
            fix="Use 700 (only you), 750 (your group reads), 2770 (your group writes), or leave it out.",
        )
    return int(text, 8)


# Find the runs that a user names


def runs_root(env: Mapping[str, str]) -> Path:
    """Where new runs go: ``$TRAINKIT_RUNS``, else ``./runs``."""
    return Path(env.get("TRAINKIT_RUNS") or "runs").expanduser().absolute()


def next_path(root: Path, name: str) -> Path:
    """Folder of the next run of that name: ``root/<name>-<id>``, ids counting up from 0001 over all runs in ``root``.

    Sequential, so that a dry run prints the very script that the submission after it will queue.
    """
    safe = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "run"
    taken = [0]
    if os.path.isdir(root):
        taken += [int(m[1]) for entry in root.iterdir() if (m := re.fullmatch(r".+-(\d{4,})", entry.name))]
    return root / f"{safe}-{max(taken) + 1:04d}"


def list_runs(root: Path) -> list[RunDir]:
    """Every run in ``root``, runs of a sweep included, oldest first."""
    found = [file.parent for pattern in ("*/config.yaml", "*/*/config.yaml") for file in root.glob(pattern)]
    hidden = [path for path in found if any(part.startswith(".") for part in path.relative_to(root).parts)]
    runs = [RunDir(path) for path in found if path.name != "code" and path not in hidden]
    return sorted(runs, key=RunDir.made)


def known_runs(env: Mapping[str, str], *, everywhere: bool = False) -> list[RunDir]:
    """All runs in the runs folder, and those that this user has submitted elsewhere, oldest first.

    Args:
        everywhere: by other installations too, which are other projects.
    """
    found = [*map(RunDir, known(everywhere=everywhere)), *list_runs(runs_root(env))]
    return sorted({run.path: run for run in found}.values(), key=RunDir.made)


def is_url(reference: str) -> bool:
    """Whether a run is named by where its copy is (`checkpoint.remote`)."""
    return reference.startswith(("s3://", "gs://", "file://"))


PRUNING = "prune.json"
"""In the folder of a sweep whose runs stop where they are behind the others."""
SAMPLER = "sampler.json"
"""In the folder of a sweep whose runs are given their settings when they begin."""


def is_sweep(folder: Path) -> bool:
    """Whether it is the folder of a sweep, whose runs are its folders 0, 1, 2, ..."""
    return os.path.isfile(folder / "sweep.json")


def find_run(reference: str, env: Mapping[str, str]) -> RunDir:
    """The run that a user names. Raises UserError: there is none, or there are several (`_folder_of`)."""
    return RunDir.open(_folder_of(reference, env))


def find_runs(reference: str, env: Mapping[str, str]) -> list[RunDir]:
    """The run that a user names, or all runs of a sweep. Raises UserError as `find_run` does."""
    folder = _folder_of(reference, env)
    if is_sweep(folder) and (runs := [run for run in list_runs(folder) if run.path.parent == folder]):
        return runs
    return [RunDir.open(folder)]


def folders_named(reference: str, env: Mapping[str, str]) -> list[Path]:
    """The folders of the runs and sweeps that a reference may mean: those here; elsewhere only if there is none here.

    Here is the runs folder, and the current folder for what is a run there. What begins with ``/``, ``~``, ``./`` or
    ``../`` is a path and nothing else. Elsewhere only a name is looked for, or ``SWEEP/NUMBER``.
    """
    given, first = Path(reference).expanduser(), reference.split("/")[0]
    if given.is_absolute() or first in (".", ".."):
        return [given.absolute()] if os.path.lexists(given) else []
    path, in_root = given.absolute(), runs_root(env) / reference
    # Whatever has that name in the runs folder stands for it, be it half a run: another of that name is not meant.
    here = [path] * (os.path.isfile(path / "config.yaml") or is_sweep(path)) + [in_root] * _may_be(in_root)
    found = here or ([] if _may_be(runs_root(env) / first) else named(reference))
    return list({os.path.realpath(folder): folder for folder in reversed(found)}.values())[::-1]


def _may_be(folder: Path) -> bool:
    """Whether there is such a folder, or this user may not even ask."""
    try:
        return stat.S_ISDIR(folder.stat().st_mode)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


def _folder_of(reference: str, env: Mapping[str, str]) -> Path:
    """The one folder that a reference means."""
    if not reference.strip():
        raise UserError("The name of the run is empty.", why="A variable of the shell may be unset.", fix=LISTED)
    found = folders_named(reference, env)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"'{reference}' names {len(found)} runs.",
            why=", ".join(str(path) for path in found),
            fix="Give the path of one of them.",
        )
    root, given = runs_root(env), Path(reference).expanduser().absolute()
    if os.path.isdir(given):
        return given  # which `RunDir.open` refuses
    names = [run.name for run in list_runs(root)] + [path.name for path in known(everywhere=True)]
    raise UserError(
        f"No run '{reference}'.",
        why=f"It is neither a folder, nor a run in {root}, nor one that you submitted from elsewhere.",
        fix=did_you_mean(reference, names, otherwise=LISTED),
    )


def closed(path: Path) -> UserError:
    """The error for a folder or a file that this user may not read."""
    try:
        whose = f"It belongs to {path.owner()} (mode {stat.S_IMODE(path.stat().st_mode):o})."
    except KeyError:  # this machine has no name for that user
        whose = f"It belongs to user {path.stat().st_uid}."
    except OSError:
        whose = "A folder on the way there does not let you in."
    return UserError(
        f"Permission denied: {path}.",
        why=whose,
        fix="Ask its owner: `chmod 750` opens it to their group; TRAINKIT_RUN_MODE=750 does so for new runs.",
    )
