"""Run SLURM's programs, and submit a job exactly once.

What the programs print is read as text: their JSON differs between versions. One that fails, or has not answered in
time, is `NoAnswer`, whoever has asked; what a run is lost without is asked again (`persist`).

A job whose id nobody could write down (the command that had called sbatch was killed, or sbatch has had no answer) is
found by its script: each submission gives SLURM a path of its own, a link in ``.submitit`` to the script in the run's
folder.
"""

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.errors import SchedulerError, UserError
from trainkit.launch.plan import Plan
from trainkit.process import Answer, NoAnswer, NoProgram, ask, scrubbed
from trainkit.ranks import expand
from trainkit.run import events
from trainkit.run.events import RunHistory, Submission, history_of
from trainkit.run.folder import RunDir
from trainkit.schedulers.base import Function, JobState, Start, pickled, unclaimed

NAME = "slurm"
PAUSES = (0.0, 2.0, 5.0)
"""Before each of the attempts to ask SLURM something, in seconds."""
PATIENCE = (15.0, 30.0, 60.0, 60.0, 60.0)
"""And before those after them, to do what a run is lost without. The controller may be gone: a backup takes over after
two minutes (SlurmctldTimeout), an upgrade takes as long. One that answers, and refuses, is not asked so long."""
# What a client of SLURM's says that has sent its request and got no answer, or half of one.
_NO_ANSWER = re.compile(
    r"socket timed out|unable to contact|zero bytes|communication|connection (refused|reset|timed out)|broken pipe"
    r"|transport endpoint|i/o error|failure\)|resource temporarily unavailable|temporarily unable|backup controller"
    r"|standby mode|gave no answer",
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
) -> Answer:  # fmt: skip
    """What one of SLURM's programs says, whatever the user has set for their own eyes. Raises NoAnswer."""
    env = {name: value for name, value in (os.environ if env is None else env).items() if not _HABITS.fullmatch(name)}
    return ask(command, env=env, cwd=cwd, text=text, seconds=seconds)


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
    failure = NoAnswer("")
    for number, pause in enumerate((*PAUSES, *PATIENCE) if patiently else PAUSES):
        if number >= len(PAUSES) and not _NO_ANSWER.search(failure.words):
            break
        time.sleep(pause)
        try:
            return (done_already() if number else "") or run(*command, env=env, cwd=cwd).require().strip()
        except NoProgram:
            raise
        except NoAnswer as error:
            failure = error
    if answer := done_already():
        return answer
    raise failure


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        yield [terminal.one_line(field, _LONGEST) for field in line.strip().split("|")]


def read_squeue(text: str) -> dict[str, JobState]:
    """Jobs by id from ``squeue -h -r -o "%i|%T|%r|%M|%N|%S"``."""
    found = {}
    for fields in _rows(text):
        if len(fields) in (5, 6):
            job_id, state, reason, _, nodes, start = [*fields, ""][:6]
            start = start if state == "PENDING" and re.fullmatch(r"[\dT:-]{16,}", start) else ""
            found[job_id] = JobState(state, job_id, NAME, "" if reason == "None" else reason, nodes, start)
    return found


def read_sacct(text: str) -> dict[str, JobState]:
    """Jobs by id from ``sacct -X -n -P -D -o JobID,State,ExitCode,NodeList``; of a requeued job the newest run."""
    found = {}
    for fields in _rows(text):
        if len(fields) == 4 and "[" not in fields[0]:
            job_id, state, exit_code, nodes = fields
            state = state.split()[0] if state else "UNKNOWN"  # "CANCELLED by 0"
            reason = f"exit code {exit_code}" if exit_code not in ("", "0:0") else ""
            found[job_id] = JobState(state, job_id, NAME, reason, "" if nodes == "None assigned" else nodes)
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
    with suppress(UserError):
        return tuple(expand(nodelist)) if nodelist not in ("", "(null)", "N/A") else ()
    return ()


def job_id_in(text: str) -> str:
    """What ``sbatch --parsable`` has queued: it prints the id, or id;cluster; a site's wrapper may have its say before
    it. Empty if there is none."""
    match = re.search(r"^(\d{1,20})(?:;.*)?$", text, flags=re.MULTILINE)
    return match[1] if match is not None else ""


SBATCH_SECONDS = 300.0
"""The longest that sbatch may take; a caller on another machine may live until then."""
LATE_SECONDS = 120.0
"""How long after the end of sbatch its job may still appear: a busy controller takes it later."""
SEARCH_PAUSES = (0.0, 2.0, 4.0)
"""Before each look for a job that sbatch has not spoken of, in seconds."""
_PATH = re.compile(r"(?<![^ ])/")
_SCRIPT = re.compile(r"/(submit|\.submitit/[^/]+)\.sbatch$")


class SbatchError(SchedulerError):
    """sbatch has failed, or has not said which job it has queued."""

    is_answer = False
    """The scheduler, or sbatch before it has asked, has said no."""


def submit(
    folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, *, cwd: Path, env: Mapping[str, str]
) -> list[str]:
    """Queue the runs in ``folder`` as one job, or one array; the job id of each.

    Raises:
        SchedulerError: there is no job, or nobody can tell.
    """
    token = secrets.token_hex(4)
    script = folder / ".submitit" / f"{token}.sbatch"
    fileio.make_folder(script.parent, folder)
    fileio.link(script, "../submit.sbatch", folder)
    for item in runs:
        events.submitting(item, NAME, token)
    try:
        job_ids = pickled(folder, runs, function, lambda: sbatch(script, env))
    except SbatchError as error:
        return _despite(error, folder, runs, plan)
    for item, job_id in zip(runs, job_ids, strict=True):
        if (cut := history_of(item).cut_short) is not None:  # else it was found in the queue before this
            write_down(item, cut, [job_id])
    return job_ids


def sbatch(script: Path, env: Mapping[str, str]) -> str:
    """Queue a script, without the variables of a job around this process; the job's id.

    Raises:
        SbatchError: it failed; with its own words.
    """
    refusal, fix = "sbatch refused the job.", "`--dry-run` shows what is submitted."
    try:
        answer = run("sbatch", "--parsable", str(script), env=scrubbed(env), seconds=SBATCH_SECONDS)
    except NoAnswer as error:
        raise SbatchError(refusal, why=error.words, fix=fix) from None
    if answer.code:
        killed = answer.code < 0 or 128 < answer.code <= 192  # 255 is its own, for an option that it does not know
        failure = SbatchError(refusal, why=answer.words.replace("sbatch: ", ""), fix=fix)
        failure.is_answer = not killed and bool(answer.err.strip()) and not _NO_ANSWER.search(answer.words)
        raise failure
    if not (job_id := job_id_in(answer.out)):
        words = repr(terminal.one_line(answer.out, 200))
        raise SbatchError("sbatch gave no job id.", why=words, fix="`python -m jobs.status` looks for it.")
    return job_id


def _despite(error: SbatchError, folder: Path, runs: Sequence[RunDir], plan: Plan) -> list[str]:
    """The ids of the jobs that are there although sbatch has failed: a busy scheduler may take one and not answer.

    Raises:
        SchedulerError: there are none; where nobody can tell, the runs' records say so.
    """
    complaint = ""
    for pause in SEARCH_PAUSES[: 1 if error.is_answer else None]:
        time.sleep(pause)
        _, complaint = search([(item, life) for item in runs if (life := history_of(item)).cut_short])
        lives = [history_of(item) for item in runs]
        if not any(life.cut_short for life in lives):
            job_ids = [life.submission.job_id for life in lives if life.submission is not None]
            print(f"sbatch has failed ({error.why}), and has queued the job: {job_ids[0]}.", file=sys.stderr)
            return job_ids
        if complaint:
            break
    if error.is_answer and (not complaint or "Batch job submission failed" in error.why):
        for index, item in enumerate(runs):
            events.refused(item, error.why)
            (folder / ".submitit" / unclaimed(index)).unlink(missing_ok=True)
        raise SchedulerError(error.what, why=error.why, fix=way_out(error.why, plan))
    for item in runs:
        events.unanswered(item, error.why)
    asked = f"SLURM cannot be asked: {complaint}" if complaint else "SLURM has no job of it yet"
    what = f"Nobody can tell whether SLURM has taken the job of {folder}."
    look, stop = (terminal.command(verb, folder) for verb in ("status", "cancel"))
    fix = f"Do not submit it anew: `{look}` looks for the job, `{stop}` ends it if it comes."
    raise SchedulerError(what, why=f"sbatch said: {error.why}. {asked}.", fix=fix)


# Options -> what sbatch calls them beside their names.
_OTHERWISE = {
    "account": "account|assoc",
    "constraint": "feature|node configuration",
    "licenses": "license",
    "mem": "memory|node configuration",
    "nodes": "node count|job size",
    **dict.fromkeys(("ntasks-per-node", "cpus-per-task"), "processors|cpu count|node configuration"),
    **dict.fromkeys(("gres", "gpus-per-node"), "generic resource|node configuration"),
    **dict.fromkeys(("nodelist", "exclude"), "node name|node configuration"),
}


def way_out(words: str, plan: Plan) -> str:
    """What to change of a job that sbatch has refused with these words: each option, and who has said it."""

    def is_named(option: str) -> bool:
        pattern = rf"\b({option.replace('-', '[- ]')}\b|{_OTHERWISE.get(option, '$^')})"
        return re.search(pattern, words, re.IGNORECASE) is not None

    named = [item for item in plan.directives if is_named(item.name)]
    # What nobody has asked for is rarely it.
    asked = [item for item in named if item.source.kind not in ("default", "derived", "trainkit")] or named
    what = ", ".join(f"--{item.name}{'' if item.value is None else f' {item.value}'} ({item.source})" for item in asked)
    ways = [f"Change {what}."] if what else []
    if is_named("account") or is_named("qos"):
        ways += ["`python -m jobs.cluster show` lists your accounts and QOS."]
    if re.search("submit ?(job)? ?limit|max(jobs|submit)", words, re.IGNORECASE):
        ways += ["If you have too many jobs there, wait for some to end."]
    return " ".join([*ways, "`--dry-run` shows all that is submitted, and who has said it."])


def search(cut_short: Sequence[tuple[RunDir, RunHistory]]) -> tuple[dict[Path, JobState], str]:
    """Look for the jobs of these runs, with one call or two, and write down those that are there.

    What is to be said of the others, and why the queue has not answered.
    """
    complaint, scripts = "", {}
    try:
        scripts = queued_scripts()
    except NoAnswer as error:
        complaint = error.words
    found = {run.path: _jobs_of(run, life, scripts) for run, life in cut_short}
    if not all(found.values()):  # it may have ended, and be forgotten
        since = min(life.cut_short.time for _, life in cut_short if life.cut_short is not None) - 60
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(max(since, 0)))
        me = str(os.geteuid())
        with suppress(NoAnswer):  # no accounting, or older than 21.08
            accounts = read_scripts(told("sacct", "-X", "-n", "-P", "-u", me, "-S", start, "-o", "JobID,SubmitLine"))
            found = {run.path: found[run.path] or _jobs_of(run, life, accounts) for run, life in cut_short}
    lost = {}
    for run, life in cut_short:
        assert life.cut_short is not None
        if not (job_ids := found[run.path]):
            lost[run.path] = _without(life.cut_short, complaint)
        elif reason := _not_adopted(run, life.cut_short, job_ids):
            lost[run.path] = JobState("UNKNOWN", job_ids[-1], NAME, reason)
    return lost, complaint


def _not_adopted(run: RunDir, cut: Submission, job_ids: Sequence[str]) -> str:
    """Write down the jobs of a submission; why not, if that is impossible."""
    is_mine = False
    with suppress(OSError):
        is_mine = run.events.stat().st_uid == os.geteuid()
    if not is_mine:
        return "its record is not yours to mend"
    try:
        write_down(run, cut, job_ids, adopted=True)
    except NoAnswer as error:
        return f"it is to be cancelled, and scancel does not do it: {error.words}"
    return ""


def write_down(folder: RunDir, cut: Submission, job_ids: Sequence[str], *, adopted: bool = False) -> None:
    """Write down the jobs that a submission has come to; those that were cancelled before anybody knew them, end now.

    Raises:
        NoAnswer: SLURM does not end them, and nothing is written down.
    """
    if cut.cancelled:
        told("scancel", *job_ids)
    for job_id in job_ids:
        events.submitted(folder, NAME, job_id, attempts_before=cut.attempts_before, adopted=adopted)
        if cut.cancelled:
            events.cancelled(folder, job_id)


def queued_scripts() -> dict[str, str]:
    """The script of each job that this user has in the queue, see `read_scripts`. Raises NoAnswer."""
    return read_scripts(told("squeue", "-h", "-r", "-t", "all", "-u", str(os.geteuid()), "-o", "%i|%o"))


def read_scripts(text: str) -> dict[str, str]:
    """Job id -> the script, with whatever stands before and after it, from ``squeue -h -r -o "%i|%o"`` or
    ``sacct -X -n -P -o JobID,SubmitLine``."""
    pairs = [line.strip().partition("|") for line in text.splitlines()]
    return {job_id: script for job_id, bar, script in pairs if bar and job_id and "[" not in job_id}


def _jobs_of(folder: RunDir, life: RunHistory, scripts: Mapping[str, str]) -> list[str]:
    """The run's jobs that its record does not know, oldest first."""
    known = {item.job_id for item in life.submissions}
    token = life.cut_short.token if life.cut_short is not None else ""
    script = f"/.submitit/{token}.sbatch" if token else "/submit.sbatch"
    new = [job_id for job_id, line in scripts.items() if job_id not in known and line.endswith(script)]
    own = [job_id for job_id in new if is_job_of(folder, job_id, scripts[job_id])]
    return sorted(own, key=lambda job_id: int(job_id.partition("_")[0]))


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


def _without(cut: Submission, complaint: str) -> JobState:
    """The state of a submission whose job was not found: its command may be at work still, or SLURM be late."""
    process, age = cut.process, time.time() - cut.time
    is_here = process is not None and process.is_here()
    is_alive = process is not None and process.is_alive()
    what = f"sbatch had no answer ({cut.unanswered})" if cut.unanswered else "its submission was cut short"
    if process is not None and is_here and is_alive and not cut.unanswered:
        what = f"process {process.pid} is just submitting it"
    elif complaint:
        what += f", and SLURM cannot be asked: {complaint}"
    elif not cut.unanswered and not is_here and (process is None or age < SBATCH_SECONDS):
        what = f"it is being submitted on {process.host if process else 'an unknown machine'}, or that was cut short"
    elif age < LATE_SECONDS:
        what += f"; SLURM has no job of it, but may still have one within {LATE_SECONDS - age:.0f} s"
        what += ", which would be cancelled" * cut.cancelled
    else:
        return JobState("NOT SUBMITTED", reason=f"{what}, and SLURM has no job of it")
    return JobState("UNKNOWN", "", NAME, what)
