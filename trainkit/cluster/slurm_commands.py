"""Run SLURM's programs, and read what they say of jobs: the queue, which forgets them soon, and the accounts.

What the programs print is read as text: their JSON differs between versions. One that fails, or has not answered in
time, is `NoAnswer`, whoever has asked; what a run is lost without is asked again (`persist`).
"""

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainkit.cluster.scheduler import ENDED, ExpectedStart, JobState
from trainkit.cluster.site import leading_number
from trainkit.cluster.waits import PastJob
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.common.hosts import expand
from trainkit.common.process import NoAnswer, NoProgram, ProgramOutput, ask

NAME = "slurm"
PAUSES = (0.0, 2.0, 5.0)
"""Seconds before each attempt to ask SLURM something."""
PATIENCE = (15.0, 30.0, 60.0, 60.0, 60.0)
"""Seconds before the attempts after them, for what a run is lost without. The controller may be gone: a backup takes
over after two minutes (SlurmctldTimeout), an upgrade takes as long. One that refuses is not asked so long."""
# Words of a client of SLURM's that has sent its request and got no answer, or half of one.
NO_ANSWER = re.compile(
    r"socket timed out|unable to contact|zero bytes|communication|connection (refused|reset|timed out)|broken pipe"
    r"|transport endpoint|i/o error|failure\)|resource temporarily unavailable|temporarily unable|backup controller"
    r"|standby mode|gave no answer",
    re.IGNORECASE,
)
# Settings of users for their own eyes: SLURM's programs take from these which jobs are shown or ended, how, and the
# cluster. Jobs are submitted to the cluster of SLURM_CONF, and the same number is another job elsewhere.
_HABITS = re.compile(r"(SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL)_.*|SLURM_(CLUSTERS|TIME_FORMAT|BITSTR_LEN)")


def run(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, text: str = "",
    seconds: float | None = None,
) -> ProgramOutput:  # fmt: skip
    """Run one of SLURM's programs without the settings that users have for their own eyes. Raises NoAnswer."""
    given = os.environ if env is None else env
    env = {name: value for name, value in given.items() if not _HABITS.fullmatch(name)}
    if command[0] in ("squeue", "sacct"):
        env["SLURM_BITSTR_LEN"] = "0"  # else a list of an array's tasks is cut after 64 characters
    if command[0] == "sacct":
        env["SLURM_TIME_FORMAT"] = "%s"  # local times are ambiguous on the night when summer ends
    return ask(command, env=env, cwd=cwd, text=text, seconds=seconds)


def told(*command: str) -> str:
    """Return what it prints. Raises NoAnswer, also if it has failed."""
    return run(*command).require()


def configuration() -> dict[str, str]:
    """Ask the controller for its configuration. Raises NoAnswer."""
    return read_config(told("scontrol", "show", "config"))


def read_config(text: str) -> dict[str, str]:
    """Read names and values from ``scontrol show config``."""
    return {name: value.strip() for name, value in re.findall(r"^(\w+) *= (.*)$", text, re.MULTILINE)}


def persist(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, patiently: bool = False,
    done_already: Callable[[], str] = lambda: "",
) -> str:  # fmt: skip
    """Return what it prints; it is asked again where it fails or does not answer.

    Args:
        patiently: a run is lost without it: a controller that is gone is asked for minutes.
        done_already: looked at before it is asked again, for what must not be done twice: the answer, if it has been
            done and only that was lost.

    Raises:
        NoAnswer: not even when it was asked for the last time.
    """
    pauses = (*PAUSES, *PATIENCE) if patiently else PAUSES
    failure = NoAnswer("")
    for number, pause in enumerate(pauses):
        if number >= len(PAUSES) and not NO_ANSWER.search(failure.words):
            break
        time.sleep(pause)
        if number:
            answer = done_already()
            if answer:
                return answer
        try:
            return run(*command, env=env, cwd=cwd).require().strip()
        except NoProgram:
            raise
        except NoAnswer as error:
            failure = error
    answer = done_already()
    if answer:
        return answer
    raise failure


def read_start(text: str) -> ExpectedStart:
    """Read what ``sbatch --test-only`` prints, on stderr for a job that it takes and for one that it refuses."""
    # 25.05 and 25.11 say "to start at TIME a using"; where there are several clusters, "TIME on cluster NAME a using".
    match = re.search(r"to start at (\S+)(?: on cluster \S+)?(?: a)? using \d+ processors on (?:nodes )?(\S+)", text)
    if match is None:
        last = (text.splitlines() or ["sbatch gave no answer"])[-1]
        words = terminal.one_line(re.sub(r"^(sbatch|allocation failure): (error: )?", "", last))
        return ExpectedStart(refusal=words, answered=NO_ANSWER.search(last) is None)
    try:
        return ExpectedStart(datetime.fromisoformat(match[1]), match[2])
    except ValueError:  # "Unknown"
        return ExpectedStart(refusal=f"no time known: {match[1]}", answered=False)


def names(nodelist: str) -> tuple[str, ...]:
    """Expand a list of nodes as SLURM writes it; none for another text."""
    if nodelist in ("", "(null)", "N/A"):
        return ()
    with suppress(UserError):
        return tuple(expand(nodelist))
    return ()


def job_id_in(text: str) -> str:
    """Find the id, or id;cluster, that ``sbatch --parsable`` prints, maybe after words of a site's wrapper."""
    match = re.search(r"^(\d{1,20})(?:;.*)?$", text, flags=re.MULTILINE)
    if match is None:
        return ""
    return match[1]


# What the queue and the accounts say of jobs

_SQUEUE = "%i|%T|%r|%M|%N|%S"
_SACCT = "JobID,State,ExitCode,NodeList"
_LONGEST = 100_000
"""Characters of a list of nodes, or of an array's tasks."""
_ARRAY = re.compile(r"(\d+)_\[(.*)\]")
_PIECE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_ENDLESS = 10**9
_OWN_CODES = range(5)
"""Exit codes of trainkit's commands."""


class Jobs:
    """States by job id, from rows of squeue or sacct. A row may be of several tasks of an array: ``17_[5-11%2]``."""

    def __init__(self, rows: Mapping[str, JobState]) -> None:
        self._rows = rows
        self._arrays: dict[str, list[tuple[list[range], JobState]]] = {}
        self._known: set[str] = set()
        for name, state in rows.items():
            self._known.add(name.partition("_")[0])
            match = _ARRAY.fullmatch(name)
            if match is not None:
                self._arrays.setdefault(match[1], []).append((tasks_in(match[2]), state))

    def of(self, job_id: str) -> JobState | None:
        """Return the state of a job, or of a task of an array."""
        if job_id in self._rows:
            return self._rows[job_id]
        array, _, task = job_id.partition("_")
        if not task.isdecimal():
            return None
        found = self._rows.get(array)
        if found is not None and found.state != "CANCELLED":
            found = None  # another job: of an array that is cancelled at once, SLURM keeps one row without numbers
        for tasks, state in self._arrays.get(array, ()):
            if any(int(task) in part for part in tasks):
                found = state
        if found is None:
            return None
        if found.state in ENDED:  # the row's reason is of the time before
            return replace(found, job_id=job_id, reason="it has not begun")
        return replace(found, job_id=job_id)

    def those_of(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """The states of the jobs that are known."""
        found = {job_id: self.of(job_id) for job_id in job_ids}
        return {job_id: state for job_id, state in found.items() if state}

    def knows_array(self, job_id: str) -> bool:
        """Return whether any task of this one's array is known."""
        return "_" in job_id and job_id.partition("_")[0] in self._known


def tasks_in(text: str) -> list[range]:
    """The numbers of an array's tasks, as SLURM lists them: ``2,4-8:2,11-13%2``; cut off, as in ``1-2,4-5...%2``, all
    from the last one on."""
    text = text.partition("%")[0]
    is_cut = text.endswith("...")
    found = []
    for piece in text.rstrip(".,").split(","):
        match = _PIECE.fullmatch(piece)
        if match is not None:
            first = int(match[1])
            found.append(range(first, int(match[2] or first) + 1, int(match[3] or 1) or 1))
    if is_cut and found:
        found[-1] = range(found[-1].start, _ENDLESS)
    return found


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        yield [terminal.one_line(field, _LONGEST) for field in line.strip().split("|")]


def read_squeue(text: str) -> dict[str, JobState]:
    """Rows by their ids from ``squeue -h -r -o "%i|%T|%r|%M|%N|%S"``."""
    found = {}
    for fields in _rows(text):
        if len(fields) in (5, 6):
            job_id, state, reason, _, nodes, start = [*fields, ""][:6]
            if state != "PENDING" or not re.fullmatch(r"[\dT:-]{16,}", start):
                start = ""
            if reason == "None":
                reason = ""
            found[job_id] = JobState(state, job_id, NAME, reason, nodes, start)
    return found


def read_sacct(text: str) -> dict[str, JobState]:
    """Rows by their ids from ``sacct -X -n -P -D -o JobID,State,ExitCode,NodeList``; of a requeued job the newest."""
    found = {}
    for fields in _rows(text):
        if len(fields) == 4:
            job_id, state, exit_code, nodes = fields
            state = (state or "UNKNOWN").split()[0]  # "CANCELLED by 0"
            if nodes == "None assigned":
                nodes = ""
            found[job_id] = JobState(state, job_id, NAME, _exit_code(exit_code), nodes)
    return found


def read_peak_memory(text: str) -> float | None:
    """MB of the largest task of the widest step, from ``sacct -n -P --units=M -o JobID,NTasks,MaxRSS``; None if it does
    not say. That step is the ranks'; a shell beside them has one task a node."""
    found: dict[int, float] = {}
    for fields in _rows(text):
        match = re.fullmatch(r"\S+\.\d+\|(\d+)\|(\d+(?:\.\d+)?)M", "|".join(fields))
        if match is not None:
            tasks = int(match[1])
            found[tasks] = max(found.get(tasks, 0.0), float(match[2]))
    return found[max(found)] if found else None


WAITS = "JobID,User,NNodes,ReqTRES,TimelimitRaw,Eligible,Start,End"
"""Fields for `read_waits`."""


def read_waits(text: str, now: float) -> list[PastJob]:
    """Read the jobs that have waited from ``sacct -X -n -P -a -o`` `WAITS`, with times in seconds since 1970.

    An array counts once, by its first task: how long the others wait is up to its own limit. So does one that waits for
    another job, from when that has ended.
    """
    found: dict[str, PastJob] = {}
    for fields in _rows(text):
        if len(fields) != 8 or not fields[5].isdecimal():
            continue
        job_id, user, nodes, resources, limit, eligible, start, end = fields
        until = min(float(word) if word.isdecimal() else now for word in (start, end))
        wait = max(until - float(eligible), 0.0)
        gpus = re.search(r"gres/gpu(?::[^=,]+)?=(\d+)", resources)
        seconds = float(limit) * 60 if limit.isdecimal() else math.inf
        size = float(gpus[1] if gpus else leading_number(nodes) or 1)
        job = PastJob(float(eligible), wait, start.isdecimal(), size, gpus is not None, seconds, user)
        of_array = re.split(r"[_+]", job_id)[0]
        other = found.get(of_array)
        if other is None or (not job.has_started, job.wait) < (not other.has_started, other.wait):
            found[of_array] = job
    return list(found.values())


def _exit_code(text: str) -> str:
    """Put an exit code of sacct into words: of one from 128 on, many versions leave out the 128."""
    if text in ("", "0:0"):
        return ""
    code = text.partition(":")[0]
    if code.isdecimal() and int(code) < 128 and int(code) not in _OWN_CODES:
        return f"exit code {text}; older versions of sacct also show {int(code) + 128} so"
    return f"exit code {text}"


def queued(job_ids: set[str]) -> Jobs:
    """Ask the queue about jobs. Raises NoAnswer; that it knows none of them is an answer."""
    try:  # `-t all` also shows jobs that have just ended, with or without accounting
        text = told("squeue", "-h", "-r", "-t", "all", "-j", _listed(job_ids), "-o", _SQUEUE)
    except NoAnswer as error:
        if "invalid job id" in error.words.lower():
            return Jobs({})
        raise
    return Jobs(read_squeue(text))


def accounted(job_ids: set[str]) -> Jobs:
    """Ask the accounts about jobs. Raises NoAnswer."""
    return Jobs(read_sacct(told("sacct", "-X", "-n", "-P", "-D", "-j", _listed(job_ids), "-o", _SACCT)))


def exit_code(job_id: str) -> str:
    """The whole exit code of a job that the controller still knows, ``143:0``; empty where it does not say."""
    with suppress(NoAnswer):
        match = re.search(r"\bExitCode=(\d+:\d+)", run("scontrol", "show", "job", "-o", job_id).require())
        if match is not None:
            return match[1]
    return ""


def _listed(job_ids: set[str]) -> str:
    """List the ids to ask for, arrays instead of tasks: both programs are silent on a task that never began."""
    return ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids}))
