"""What a batch script asks of SLURM about its own job: state, requeue, nodes to do without, the next link of a chain.

A scheduler that does not answer is asked again; what it still has not done then is `NotDone`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from trainkit import fileio, programs, terminal
from trainkit.cluster.slurm_jobs import run as slurm
from trainkit.errors import UserError
from trainkit.launch.environment import scrubbed
from trainkit.launch.sweeps import PART
from trainkit.programs import NoAnswer
from trainkit.ranks.env import expand
from trainkit.run.events import job_of, submitted
from trainkit.run.folder import RunDir

ASK_SECONDS = 15.0
"""A scheduler that has not answered by then is asked again."""
PAUSES = (0.0, 2.0, 5.0)
"""Before each of the attempts to ask it something, in seconds."""
PATIENCE = (15.0, 30.0, 60.0, 60.0, 60.0)
"""And before those after them, to do what a run is lost without. The controller may be gone: a backup takes over after
two minutes (SlurmctldTimeout), an upgrade takes as long. One that answers, and refuses, is not asked so long."""
_GONE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|Connection (refused|timed out)"
    r"|backup controller|standby mode|gave no answer",
    re.IGNORECASE,
)


class NotDone(Exception):
    """The scheduler has not done it; with its words."""


def ask(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, patiently: bool = False,
    done_already: Callable[[], str] = lambda: "",
) -> str:  # fmt: skip
    """What it answers.

    Args:
        patiently: a run is lost without it: a controller that is gone is asked for minutes.
        done_already: looked at before it is asked again, for what must not be done twice: the answer, if it has been
            done and only that was lost.

    Raises:
        NotDone: not even when it was asked for the last time.
    """
    words = ""
    for number, pause in enumerate((*PAUSES, *PATIENCE) if patiently else PAUSES):
        if number >= len(PAUSES) and not _GONE.search(words):
            break
        time.sleep(pause)
        if number and (answer := done_already()):
            return answer
        try:
            return programs.ask(command, env=env, cwd=cwd, seconds=ASK_SECONDS).require().strip()
        except programs.NoProgram as error:
            raise NotDone(error.words) from None
        except NoAnswer as error:
            words = error.words
    if answer := done_already():
        return answer
    raise NotDone(words)


class OwnJob(NamedTuple):
    """What the queue says of a job."""

    state: str = ""
    """Empty if SLURM does not answer, which is no reason to lose a run."""
    excluded: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """Nodes asked for by --nodelist."""
    reason: str = ""
    """Of the state: ``TimeLimit``, ..."""

    @property
    def is_to_be_queued(self) -> bool:
        """Whether it is for its script to put it back into the queue: it is neither cancelled nor on its way back.

        One that is over its time limit is ended like a cancelled one, and SLURM takes its requeue all the same.
        """
        return self.state in ("RUNNING", "") or (self.reason == "TimeLimit" and self.state in ("COMPLETING", "TIMEOUT"))


class Node(NamedTuple):
    """What sinfo says of a node."""

    state: str
    """``idle``, ``down*``, ..."""
    kind: str = ""
    """GPUs and features: a job that runs on one node can run on another of its kind."""


def own_job(job_id: str) -> OwnJob:
    """This script's own job."""
    try:
        answer = ask("squeue", "-h", "-j", job_id, "-o", "%T|%x|%n|%r")
    except NotDone:
        return OwnJob()
    state, excluded, required, reason, *_ = (answer + "|||").split("|")
    return OwnJob(state, names(excluded), names(required), reason)


def nodes_in(partition: str) -> dict[str, Node]:
    """The nodes of a partition by name; empty if SLURM does not answer."""
    where = ["-p", partition] if partition else []
    try:
        lines = ask("sinfo", "-h", "-N", *where, "-o", "%N %t %G %f").splitlines()
    except NotDone:
        return {}
    return {words[0]: Node(words[1], "".join(words[2:])) for line in lines if len(words := line.split(None, 2)) > 1}


def restarted(nodes: Sequence[str], since: float) -> dict[str, str]:
    """Which of the nodes were booted, or had their slurmd started, after a time in seconds since 1970, and when; empty
    if SLURM does not answer."""
    try:
        lines = ask("scontrol", "show", "node", "-o", ",".join(nodes)).splitlines() if nodes else []
    except NotDone:
        return {}
    found = {}
    for line in lines:
        fields = dict(word.partition("=")[::2] for word in line.split())
        for key, what in (("SlurmdStartTime", "its slurmd was started"), ("BootTime", "it was booted")):
            with contextlib.suppress(ValueError):  # "None", of a node that has not answered yet
                if datetime.fromisoformat(fields.get(key, "")).timestamp() > since:
                    found[fields.get("NodeName", "")] = f"{what} at {fields[key]}"
    return found


def requeue(job_id: str) -> None:
    """Put the job back into the queue; SLURM ends this script then.

    Raises:
        NotDone: it will not.
    """
    ask("scontrol", "requeue", job_id, patiently=True)


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """Let a job that is on its way back into the queue do without nodes. SLURM takes this from jobs that wait only.

    Raises:
        NotDone: it will not.
    """
    ask("scontrol", "update", f"job={job_id}", f"ExcNodeList={','.join(nodes)}")


def has_scontrol() -> bool:
    """Whether there is a scontrol: not in most containers."""
    return shutil.which("scontrol") is not None


def unclaimed(index: int) -> str:
    """Name of the pickle of a run that has no job id yet; ``index``: its number in a sweep."""
    return f"{index}.pkl"


def claim_pickle(run: RunDir, env: Mapping[str, str]) -> None:
    """Give this job's pickle its name, if the command that queued it was killed before it could."""
    index = env.get("SLURM_ARRAY_TASK_ID")
    for folder in _folders(run, index):
        mine = folder / ".submitit" / f"{job_of(env)}_submitted.pkl"
        found = mine.with_name(unclaimed(int(index or 0)))
        if not mine.exists() and found.is_file():
            with contextlib.suppress(FileNotFoundError):  # it is just being renamed
                fileio.copy(found, mine, folder)


def _folders(run: RunDir, index: str | None) -> list[Path]:
    """Folders with the script of a job that is this run: the run's, or those of arrays whose task ``index`` it is."""
    if index is None:
        return [run.path]
    here = os.path.realpath(run.path)
    sweep = run.path.parent
    return [folder for folder in (sweep, *sweep.glob(f".submitit/{PART}*")) if os.path.realpath(folder / index) == here]


def queue_next_link(run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
    """Queue a job that goes on where this one has stopped, once it has ended; its id.

    Raises:
        NotDone: sbatch will not.
    """
    index = env.get("SLURM_ARRAY_TASK_ID")
    old = job_of(env)
    known = [folder for folder in _folders(run, index) if (folder / ".submitit" / f"{old}_submitted.pkl").is_file()]
    folder = known[0] if known else run.path
    script = folder / "submit.sbatch"
    if not script.is_file():
        return _queue_template(run, excluded, env)
    name = run.path.name if index is None else f"{run.path.parent.name}-{run.path.name}"
    more = [f"--exclude={','.join(excluded)}"] if excluded else []
    more += [] if index is None else [f"--array={index}"]
    # The run's own name, so that singleton makes it wait for other links of this chain and for nobody else.
    answer = ask(
        "sbatch", "--parsable", "--no-requeue", f"--job-name={name}",
        f"--dependency=afterany:{old},singleton", *more, str(script), env=scrubbed(env), cwd=folder,
        done_already=lambda: _link_after(old, name),
    )  # fmt: skip
    new = _queued(answer, old, name) + ("" if index is None else f"_{index}")
    pickle = folder / ".submitit" / f"{old}_submitted.pkl"
    fileio.copy(
        pickle, pickle.with_name(f"{new}_submitted.pkl"), folder
    )  # before this job ends, so before that one starts
    submitted(run, "slurm", new, continues=old)
    return new


CONTINUE = "TRAINKIT_CONTINUE"
"""Environment variable of the templates: the run folder that a job goes on with, instead of making its own."""


ARGUMENTS = "TRAINKIT_ARGUMENTS"
"""Of the templates too: the preset and the settings that sbatch was given, one a line."""


def _queue_template(run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
    """The same for a template: the script that sbatch was given, with its arguments and what SLURM has granted."""
    old = job_of(env)
    *granted, command = ask("squeue", "-h", "-j", old, "-o", "%a|%P|%q|%l|%D|%f|%o").split("|", 6)
    if len(granted) < 6:
        raise NotDone(f"squeue does not say what job {old} is: {terminal.one_line(command, 200)}")
    if ARGUMENTS in env:
        arguments = env[ARGUMENTS].splitlines()
        script = command.removesuffix(" " + " ".join(arguments))  # before 23.11 SLURM adds them, without quotes
    else:  # a copy of the template from before
        script, *arguments = command.split() or [""]
    if not os.path.isfile(script):
        raise NotDone(f"there is no {terminal.one_line(script) or 'script'} to be queued again")
    flags = dict(zip(("account", "partition", "qos", "time", "nodes", "constraint"), granted, strict=True))
    for name in ("ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem-per-node"):
        flags[name.replace("mem-per-node", "mem")] = env.get("SLURM_" + name.upper().replace("-", "_"), "")
    flags["exclude"] = ",".join(excluded)
    given = [f"--{name}={text}" for name, text in flags.items() if text not in ("", "(null)", "N/A")]
    answer = ask(
        "sbatch", "--parsable", "--no-requeue", "--export=ALL", f"--job-name={run.path.name}",
        f"--dependency=afterany:{old},singleton", *given, script, *arguments,
        env={**scrubbed(env), CONTINUE: str(run.path)}, cwd=Path(env.get("SLURM_SUBMIT_DIR", ".")),
        done_already=lambda: _link_after(old, run.path.name),
    )  # fmt: skip
    new = _queued(answer, old, run.path.name)
    submitted(run, "slurm", new, continues=old)
    return new


def job_id_in(text: str) -> str:
    """What ``sbatch --parsable`` has queued: it prints the id, or id;cluster; a site's wrapper may have its say before
    it. Empty if there is none."""
    match = re.search(r"^(\d{1,20})(?:;.*)?$", text, flags=re.MULTILINE)
    return match[1] if match is not None else ""


def _queued(answer: str, old: str, name: str) -> str:
    if job_id := job_id_in(answer) or _link_after(old, name):
        return job_id
    raise NotDone(f"sbatch gave no job id: {terminal.one_line(answer, 200)!r}")


def _link_after(old: str, name: str) -> str:
    """The job of that name that waits for the end of an old one: sbatch may have queued it and had no answer."""
    with contextlib.suppress(NoAnswer):
        jobs = slurm("squeue", "-h", "-u", str(os.geteuid()), "-n", name, "-t", "PENDING", "-o", "%i|%E").splitlines()
        return next((job.split("|")[0].split("_")[0] for job in jobs if re.search(rf"afterany:{old}\b", job)), "")
    return ""


def names(nodelist: str) -> tuple[str, ...]:
    """The nodes of a list as SLURM writes it; none for what is no list."""
    try:
        return tuple(expand(nodelist)) if nodelist not in ("", "(null)", "N/A") else ()
    except UserError:
        return ()


def nodes_of(env: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes of this job."""
    return names(env.get("SLURM_JOB_NODELIST", ""))
