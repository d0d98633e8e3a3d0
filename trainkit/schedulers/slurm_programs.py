"""SLURM's programs, run in one place, and what they print as text. Its JSON differs between its versions.

A program that fails, or has not answered in time, is `NoAnswer`, whoever has asked. What a run is lost without is asked
again (`persist`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from trainkit import programs, terminal
from trainkit.errors import UserError
from trainkit.programs import NoAnswer, NoProgram
from trainkit.ranks.env import expand
from trainkit.schedulers.base import JobState, Start

NAME = "slurm"
PAUSES = (0.0, 2.0, 5.0)
"""Before each of the attempts to ask SLURM something, in seconds."""
PATIENCE = (15.0, 30.0, 60.0, 60.0, 60.0)
"""And before those after them, to do what a run is lost without. The controller may be gone: a backup takes over after
two minutes (SlurmctldTimeout), an upgrade takes as long. One that answers, and refuses, is not asked so long."""
_GONE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|Connection (refused|timed out)"
    r"|backup controller|standby mode|gave no answer",
    re.IGNORECASE,
)
# What users set for their own eyes: SLURM's programs take from these which jobs are shown or ended, how, and of which
# cluster. Jobs are submitted to the cluster of SLURM_CONF, and the same number is another job elsewhere.
_HABITS = re.compile(r"(SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL)_.*|SLURM_(CLUSTERS|TIME_FORMAT|BITSTR_LEN)")
_LONGEST = 5000
"""Characters of a list of nodes."""


def run(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, text: str = "",
    seconds: float | None = None,
) -> programs.Answer:  # fmt: skip
    """What one of SLURM's programs says, whatever the user has set for their own eyes. Raises NoAnswer."""
    env = {name: value for name, value in (os.environ if env is None else env).items() if not _HABITS.fullmatch(name)}
    return programs.ask(command, env=env, cwd=cwd, text=text, seconds=seconds)


def told(*command: str) -> str:
    """What it prints. Raises NoAnswer, also if it has failed."""
    return run(*command).require()


def persist(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, patiently: bool = False,
    done_already: Callable[[], str] = lambda: "",
) -> str:  # fmt: skip
    """What it prints, asked again where it fails or does not answer.

    Args:
        patiently: a run is lost without it: a controller that is gone is asked for minutes.
        done_already: looked at before it is asked again, for what must not be done twice: the answer, if it has been
            done and only that was lost.

    Raises:
        NoAnswer: not even when it was asked for the last time.
    """
    failure: NoAnswer | None = None
    for number, pause in enumerate((*PAUSES, *PATIENCE) if patiently else PAUSES):
        if failure is not None and number >= len(PAUSES) and not _GONE.search(failure.words):
            break
        time.sleep(pause)
        if number and (answer := done_already()):
            return answer
        try:
            return run(*command, env=env, cwd=cwd).require().strip()
        except NoProgram:
            raise
        except NoAnswer as error:
            failure = error
    assert failure is not None
    if answer := done_already():
        return answer
    raise failure


# What they print


def read_squeue(text: str) -> dict[str, JobState]:
    """Jobs by id from ``squeue -h -r -o "%i|%T|%r|%M|%N|%S"``."""
    found = {}
    for line in text.splitlines():
        fields = [terminal.one_line(field, _LONGEST) for field in line.strip().split("|")]
        if len(fields) in (5, 6):
            job_id, state, reason, _, nodes, start = [*fields, ""][:6]
            start = start if state == "PENDING" and re.fullmatch(r"[\dT:-]{16,}", start) else ""
            found[job_id] = JobState(state, job_id, NAME, "" if reason == "None" else reason, nodes, start)
    return found


def read_sacct(text: str) -> dict[str, JobState]:
    """Jobs by id from ``sacct -X -n -P -D -o JobID,State,ExitCode,NodeList``; of a requeued job the newest run."""
    found = {}
    for line in text.splitlines():
        fields = [terminal.one_line(field, _LONGEST) for field in line.strip().split("|")]
        if len(fields) == 4 and "[" not in fields[0]:
            job_id, state, exit_code, nodes = fields
            reason = f"exit code {exit_code}" if exit_code not in ("", "0:0") else ""
            nodes = "" if nodes == "None assigned" else nodes
            # "CANCELLED by 0"
            found[job_id] = JobState(state.split()[0] if state else "UNKNOWN", job_id, NAME, reason, nodes)
    return found


def read_start(text: str) -> Start:
    """From what ``sbatch --test-only`` prints, on stderr, whether it takes the job or not."""
    # 25.05 and 25.11 say "to start at TIME a using"; where there are several clusters, "TIME on cluster NAME a using".
    match = re.search(r"to start at (\S+)(?: on cluster \S+)?(?: a)? using \d+ processors on (?:nodes )?(\S+)", text)
    if match is None:
        lines = [re.sub(r"^(sbatch|allocation failure): (error: )?", "", line) for line in text.splitlines()]
        return Start(refusal=terminal.one_line(lines[-1]) if lines else "sbatch said nothing")
    try:
        return Start(datetime.fromisoformat(match[1]), match[2])
    except ValueError:  # "Unknown"
        return Start(refusal=f"no time known: {match[1]}")


def names(nodelist: str) -> tuple[str, ...]:
    """The nodes of a list as SLURM writes it; none for what is no list."""
    try:
        return tuple(expand(nodelist)) if nodelist not in ("", "(null)", "N/A") else ()
    except UserError:
        return ()


def job_id_in(text: str) -> str:
    """What ``sbatch --parsable`` has queued: it prints the id, or id;cluster; a site's wrapper may have its say before
    it. Empty if there is none."""
    match = re.search(r"^(\d{1,20})(?:;.*)?$", text, flags=re.MULTILINE)
    return match[1] if match is not None else ""
