"""Jobs whose id nobody could write down: the command that had called sbatch was killed, or sbatch has had no answer.

SLURM knows which script each job was submitted with. Each submission gives it a path of its own, a link in
``.submitit`` to the script in the run's folder, so that its job is told from all others.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.cluster.slurm_jobs import JobState
from trainkit.cluster.slurm_jobs import run as slurm
from trainkit.programs import NoAnswer
from trainkit.run.events import CutShort, Life, cancelled, submitted
from trainkit.run.folder import RunDir

SBATCH_SECONDS = 300.0
"""So long sbatch may take; who called it on another machine may live until then."""
LATE_SECONDS = 120.0
"""So long after sbatch was killed, or gave up waiting, its job may still appear: a busy controller takes it later."""
_PATH = re.compile(r"(?<![^ ])/")
_SCRIPT = re.compile(r"/(submit|\.submitit/[^/]+)\.sbatch$")


@dataclass(frozen=True)
class Search:
    """What became of submissions that were cut short."""

    adopted: frozenset[Path] = frozenset()
    """Runs whose jobs have been found and written down."""
    lost: Mapping[Path, JobState] = field(default_factory=dict)
    """What is to be said of the others."""
    complaint: str = ""
    """Why the queue has not answered."""


def adopt(cut_short: Sequence[tuple[RunDir, Life]], *, heard: Callable[[str], None] = lambda command: None) -> Search:
    """Look for the jobs of these runs, and write down those that are there, with one call or two."""
    if not cut_short:
        return Search()
    complaint, scripts = "", {}
    me = str(os.geteuid())
    heard("squeue")
    try:
        scripts = read_scripts(slurm("squeue", "-h", "-r", "-t", "all", "-u", me, "-o", "%i|%o"))
    except NoAnswer as error:
        complaint = error.words
    found = {folder.path: _jobs_of(folder, life, scripts) for folder, life in cut_short}
    if not all(found.values()):  # it may have ended, and be forgotten
        heard("sacct")
        since = min(life.cut_short.time for _, life in cut_short if life.cut_short is not None) - 60
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(max(since, 0)))
        try:
            accounts = read_scripts(slurm("sacct", "-X", "-n", "-P", "-u", me, "-S", start, "-o", "JobID,SubmitLine"))
        except NoAnswer:  # no accounting, or older than 21.08
            accounts = {}
        found = {folder.path: found[folder.path] or _jobs_of(folder, life, accounts) for folder, life in cut_short}
    adopted, lost = set(), {}
    for folder, life in cut_short:
        assert life.cut_short is not None
        if found[folder.path] and _is_mine(folder):
            try:
                write_down(folder, life.cut_short, found[folder.path], adopted=True)
            except NoAnswer as error:
                reason = f"it is to be cancelled, and scancel does not do it: {error.words}"
                lost[folder.path] = JobState("UNKNOWN", found[folder.path][-1], "slurm", reason)
                continue
            adopted.add(folder.path)
        elif found[folder.path]:
            lost[folder.path] = JobState("UNKNOWN", found[folder.path][-1], "slurm", "its record is not yours to mend")
        else:
            lost[folder.path] = _without(life.cut_short, complaint)
    return Search(frozenset(adopted), lost, complaint)


def write_down(run: RunDir, cut: CutShort, job_ids: Sequence[str], *, adopted: bool = False) -> None:
    """Write down the jobs that a submission has come to; those that were cancelled before anybody knew them, end now.

    Raises:
        NoAnswer: SLURM does not end them, and nothing is written down.
    """
    if cut.cancelled:
        slurm("scancel", *job_ids)
    for job_id in job_ids:
        submitted(run, "slurm", job_id, attempts_before=cut.attempts_before, adopted=adopted)
        if cut.cancelled:
            cancelled(run, job_id)


def read_scripts(text: str) -> dict[str, str]:
    """Job id -> the script, with whatever stands before and after it, from ``squeue -h -r -o "%i|%o"`` or
    ``sacct -X -n -P -o JobID,SubmitLine``."""
    pairs = [line.strip().partition("|") for line in text.splitlines()]
    return {job_id: script for job_id, bar, script in pairs if bar and job_id and "[" not in job_id}


def _jobs_of(folder: RunDir, life: Life, scripts: Mapping[str, str]) -> list[str]:
    """The run's jobs that its record does not know, oldest first."""
    known = {item.job_id for item in life.submissions}
    token = life.cut_short.token if life.cut_short is not None else ""
    script = f"/.submitit/{token}.sbatch" if token else "/submit.sbatch"
    found = [
        job_id
        for job_id, line in scripts.items()
        if job_id not in known and line.endswith(script) and is_job_of(folder, job_id, line)
    ]
    return sorted(found, key=lambda job_id: int(job_id.partition("_")[0]))


def is_job_of(folder: RunDir, job_id: str, line: str) -> bool:
    """Whether the script that SLURM was given, in a line of `read_scripts`, is the run's.

    A task of an array is the run that lies, or is linked, beside the array's script under the task's number.
    """
    number, _, task = job_id.partition("_")
    script = _SCRIPT.search(line)
    if script is None or not number.isdecimal():
        return False
    # Whatever stands before the script, and whether its own path has spaces in it.
    places = [line[match.start() : script.start()] for match in _PATH.finditer(line) if match.start() < script.start()]
    here = os.path.realpath(folder.path)
    return any(os.path.realpath(os.path.join(place, task) if task else place) == here for place in places)


def _is_mine(folder: RunDir) -> bool:
    try:
        return folder.events.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _without(cut: CutShort, complaint: str) -> JobState:
    """No job was found."""
    process = cut.process
    if not cut.unanswered and process is not None and process.is_here() and process.is_alive():
        return JobState("UNKNOWN", "", "slurm", f"process {process.pid} is just submitting it")
    what = f"sbatch had no answer ({cut.unanswered})" if cut.unanswered else "its submission was cut short"
    if complaint:
        return JobState("UNKNOWN", "", "slurm", f"{what}, and SLURM cannot be asked: {complaint}")
    if not cut.unanswered and (process is None or (not process.is_here() and time.time() - cut.time < SBATCH_SECONDS)):
        where = process.host if process is not None else "an unknown machine"
        return JobState("UNKNOWN", "", "slurm", f"it is being submitted on {where}, or that was cut short")
    if (left := cut.time + LATE_SECONDS - time.time()) > 0:
        late = f"{what}; SLURM has no job of it, but may still have one within {left:.0f} s"
        return JobState("UNKNOWN", "", "slurm", late + ", which would be cancelled" * cut.cancelled)
    return JobState("NOT SUBMITTED", reason=f"{what}, and SLURM has no job of it")
