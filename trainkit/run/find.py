"""Find the runs that a user names."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainkit.common.errors import UserError, did_you_mean
from trainkit.run.folder import LISTED, RunDir, is_sweep, sweep_of
from trainkit.run.user_lists import known

_OF_TEMPLATE = re.compile(r".+-job([0-9]{1,19})")


def named(reference: str) -> list[Path]:
    """Folders of the runs and sweeps of that name, ``SWEEP/NUMBER`` included: those of this installation, or where it
    has none those of others."""
    for everywhere in (False, True):
        found: dict[Path, None] = {}
        for run in known(everywhere=everywhere):
            sweep = sweep_of(RunDir(run))
            if sweep is not None and reference == sweep.name:
                found[sweep] = None
            elif (run.name.isdecimal() and reference == f"{run.parent.name}/{run.name}") or (
                sweep is None and reference == run.name
            ):
                found[run] = None
        if found:
            return list(found)
    return []


def runs_root(env: Mapping[str, str]) -> Path:
    """Return the folder for new runs: ``$TRAINKIT_RUNS``, else ``./runs``."""
    return Path(env.get("TRAINKIT_RUNS") or "runs").expanduser().absolute()


def next_path(root: Path, name: str) -> Path:
    """Folder of the next run of that name: ``root/<name>-<id>``, ids counting up from 0001 over all runs in ``root``.

    Sequential, so that a dry run prints the very script that the submission after it will queue.
    """
    safe = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "run"
    newest = 0
    for entry in root.glob("*"):
        match = re.fullmatch(r".+-(\d{4,})", entry.name)
        if match:
            newest = max(newest, int(match[1]))
    return root / f"{safe}-{newest + 1:04d}"


def list_runs(root: Path) -> list[RunDir]:
    """Every run in ``root``, runs of a sweep included, oldest first."""
    runs: list[RunDir] = []
    for file in (*root.glob("*/config.yaml"), *root.glob("*/*/config.yaml")):
        is_hidden = "/." in f"/{file.relative_to(root)}"
        if not is_hidden and file.parent.name != "code":
            runs.append(RunDir(file.parent))
    return sorted(runs, key=RunDir.made)


def known_runs(env: Mapping[str, str], *, everywhere: bool = False) -> list[RunDir]:
    """All runs in the runs folder, and those that this user has submitted elsewhere, oldest first.

    Args:
        everywhere: by other installations too, which are other projects.
    """
    found = [*map(RunDir, known(everywhere=everywhere)), *list_runs(runs_root(env))]
    return sorted({run.path: run for run in found}.values(), key=RunDir.made)


def is_url(reference: str) -> bool:
    """True if a run is named by where its copy is (`checkpoint.remote`)."""
    return reference.startswith(("s3://", "gs://", "file://"))


def find_run(reference: str, env: Mapping[str, str]) -> RunDir:
    """The run that a user names. Raises UserError: there is none, or there are several (`_folder_of`)."""
    return RunDir.open(_folder_of(reference, env))


def find_runs(reference: str, env: Mapping[str, str]) -> list[RunDir]:
    """The run that a user names, or all runs of a sweep. Raises UserError as `find_run` does."""
    folder = _folder_of(reference, env)
    runs: list[RunDir] = []
    if is_sweep(folder):
        runs = [run for run in list_runs(folder) if run.path.parent == folder]
    return runs or [RunDir.open(folder)]


def runs_named(references: Iterable[str], env: Mapping[str, str]) -> list[RunDir]:
    """The runs that a user names, those of sweeps included. Raises UserError as `find_run` does."""
    return list(itertools.chain.from_iterable(find_runs(reference, env) for reference in references))


def folders_named(reference: str, env: Mapping[str, str]) -> list[Path]:
    """The folders of the runs and sweeps that a reference may mean: those here; elsewhere only if there is none here.

    Here is the runs folder, and the current folder for what is a run there. What begins with ``/``, ``~``, ``./`` or
    ``../`` is a path and nothing else. Elsewhere only a name is looked for, or ``SWEEP/NUMBER``.
    """
    given = Path(reference).expanduser()
    first = reference.split("/")[0]
    if given.is_absolute() or first in (".", ".."):
        return [given.absolute()] if os.path.lexists(given) else []
    path = given.absolute()
    in_root = runs_root(env) / reference
    # Whatever has that name in the runs folder stands for it, be it half a run: another of that name is not meant.
    found = []
    if os.path.isfile(path / "config.yaml") or is_sweep(path):
        found.append(path)
    if _may_be(in_root):
        found.append(in_root)
    if not found and not _may_be(runs_root(env) / first):
        found = named(reference)
    unique: dict[str, Path] = {}
    for folder in found:
        unique.setdefault(os.path.realpath(folder), folder)
    return list(unique.values())


def _may_be(folder: Path) -> bool:
    """True if there is such a folder, or this user may not even ask."""
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
        why = ", ".join(map(str, found))
        raise UserError(f"'{reference}' names {len(found)} runs.", why=why, fix="Give the path of one of them.")
    root = runs_root(env)
    given = Path(reference).expanduser().absolute()
    if os.path.isdir(given):
        return given  # which `RunDir.open` refuses
    names = [run.name for run in list_runs(root)] + [path.name for path in known(everywhere=True)]
    why = f"It is neither a folder, nor a run in {root}, nor a run that you submitted from elsewhere."
    fix = did_you_mean(reference, names, otherwise=LISTED)
    match = _OF_TEMPLATE.fullmatch(given.name)
    if match is not None:  # the run of another job is not near
        why += f" If job {match[1]} belongs to a template, it creates the run when it starts."
        fix = f"`squeue -j {match[1]}` tells if it waits, and slurm-{match[1]}.out, in sbatch's folder, what failed."
    raise UserError(f"No run '{reference}'.", why=why, fix=fix)
