"""The verbs for notebooks and scripts: the same code, with a run as what it gives.

Errors for users are raised (`trainkit.errors`) instead of printed; everything else is printed as the verbs do.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import cancel, following, report, resume
from jobs import submit as submitting
from trainkit import fileio
from trainkit.errors import UserError
from trainkit.run.folder import RunDir, find_run
from trainkit.run.metrics import read_metrics, standing_of
from trainkit.schedulers.states import job_state

Flag = str | int | bool | None | Sequence[str]
_NOT_HERE = {
    "follow": "`run.wait()` waits for it, `run.follow()` shows its progress",
    "wait": "`run.wait()` waits for it",
    "dry_run": "`python -m jobs.submit` has it",
    "estimate": "`python -m jobs.submit` has it",
    "host": "`python -m jobs.submit` has it",
}


@dataclass(frozen=True)
class Run:
    """A run, by its folder. Everything is asked anew each time."""

    path: Path

    @property
    def name(self) -> str:
        """Its folder's."""
        return self.path.name

    @property
    def status(self) -> str:
        """``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ``CANCELLED``, ...: what its scheduler says now."""
        return job_state(self._folder).state

    @property
    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says of a run that has ended: best and test metrics, time, memory; empty before.

        Raises UserError where it cannot be read.
        """
        file = self._folder.summary
        try:
            text = fileio.read_text(file)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise fileio.unreadable(file, error) from None
        if (found := fileio.parse_object(text)) is None:
            raise fileio.unreadable(file, OSError(None, "It holds no JSON object"))
        return found

    def metrics(self, split: str | None = None) -> list[dict[str, Any]]:
        """Records of ``train``, ``val`` or ``test``, or of all, in order of step; `pandas.DataFrame` takes them."""
        return read_metrics(self._folder, split)

    def wait(self) -> str:
        """Wait until it has ended; its state then. Raises an error with the cause if it has failed."""
        following.wait_for(self._folder)
        return self.status

    def follow(self) -> str:
        """The same, and shows its progress."""
        following.follow_to_end(self._folder)
        return self.status

    def cancel(self) -> None:
        """End its job. What it has saved stays, and `resume` goes on from it."""
        cancel.main([str(self.path)], os.environ)

    def resume(self, **flags: Flag) -> None:
        """Queue it again, from its newest checkpoint; ``flags`` as of `submit`."""
        resume.main([str(self.path), *_words(flags), "--no-follow"], os.environ)

    def report(self) -> Path:
        """Write its log book, with plots; where it is."""
        report.main([str(self.path)], os.environ)
        return self.path / "logbook.md"

    @property
    def _folder(self) -> RunDir:
        return RunDir(self.path)

    def __repr__(self) -> str:
        standing = standing_of(self._folder)
        step = f" at step {standing.last['step']}" if "step" in standing.last else ""
        return f"<{self.name}: {self.status}{step}>"


def submit(
    preset: str | Path,
    overrides: Sequence[str] = (),
    *,
    sweep: Mapping[str, Sequence[object]] | None = None,
    **flags: Flag,
) -> Run | list[Run]:
    """What ``python -m jobs.submit`` does; it returns as soon as the job is queued, or started on this machine.

    Where the same run is there already, queued, running or finished, it is returned (``again=True``: one more is made).

    Args:
        preset: in configs/, a YAML file, or the folder of a run to repeat.
        overrides: ``section.key=value``.
        sweep: setting -> its values: a run for each, or for all combinations; then a list is returned.
        flags: the command's own, with underscores: ``nodes=2``, ``gpus_per_node=4``, ``time="2:00:00"``,
            ``executor="local"``, ``again=True``.

    Raises:
        TrainkitError: what the command would have said.
    """
    for name in flags:
        if name in _NOT_HERE:
            raise UserError(f"submit() has no {name}=.", why="It returns at once.", fix=f"{_NOT_HERE[name]}.")
    started: list[Run] = []

    def note(runs: Sequence[RunDir], going_on: Sequence[RunDir], executor: str, args: Namespace) -> int:
        started.extend(Run(run.path) for run in runs)
        return 0

    points = [f"{key}={','.join(map(str, values))}" for key, values in (sweep or {}).items()]
    words = [str(preset), *overrides, *_words({"sweep": points, **flags})]
    submitting.submit(words, os.environ, note)
    return started if sweep is not None else started[0]


def open(reference: str | Path) -> Run:
    """The run of that name, in the runs folder or submitted from elsewhere; or of that folder.

    Raises UserError when there is none, or several.
    """
    return Run(find_run(_word(reference), os.environ).path)


def compare(*runs: Run | str | Path, out: str | Path = "report") -> Path:
    """Write one log book of several runs, with speed-ups over the first, into the folder ``out``; where it is."""
    report.main([*(_word(run) for run in runs), "--out", str(out)], os.environ)
    return Path(out) / "logbook.md"


def _word(reference: Run | str | Path) -> str:
    """As a command takes it. A `Path` is one, though it has lost its ``./``."""
    path = reference.path if isinstance(reference, Run) else reference
    return path if isinstance(path, str) else str(path.expanduser().absolute())


def _words(flags: Mapping[str, Flag]) -> list[str]:
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [word for one in value for word in (flag, str(one))]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words
