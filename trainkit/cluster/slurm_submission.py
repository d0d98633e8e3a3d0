"""Submit a job exactly once: its batch script, sbatch, and the search for a job that sbatch has not spoken of.

The script is the same for a dry run and for the submission after it. A job whose id nobody could write down (the
command that had called sbatch was killed, or sbatch has had no answer) is found by its script: each submission gives
SLURM a path of its own, a link in ``.submitit`` to the script in the run's folder.
"""

import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainkit.cluster import containers
from trainkit.cluster.pickles import BEGIN, PYTHON_FLAGS, TASK, pickled, shell_template, unclaimed
from trainkit.cluster.plan import LIMIT_MINUTES, Plan, is_part, whole
from trainkit.cluster.scheduler import Function, JobState, QueueFullError
from trainkit.cluster.slurm_commands import NAME, NO_ANSWER, job_id_in, run, told
from trainkit.common import fileio, terminal
from trainkit.common.errors import SchedulerError, UserError
from trainkit.common.process import KEEP_FREED_MEMORY, NoAnswer, scrubbed
from trainkit.run import events
from trainkit.run.folder import LOST, PREFLIGHT, REQUEUE, RunDir, as_open_as
from trainkit.run.history import RunHistory, Submission, history_of

SILENCE_SECONDS = 30
"""Time for the node of a batch script to say that it lives, before SLURM is asked."""
CHECK = BEGIN + "import runpy; runpy.run_module('trainkit.distributed.health', run_name='__main__')"


def batch_script(
    plan: Plan,
    folder: Path,
    cwd: Path,
    points: int = 1,
    *,
    python: str = sys.executable,
    feeds: Sequence[Path] = (),
) -> str:
    """Write the whole script; its text is in batch_script.jinja.

    Args:
        folder: folder of the run; of the sweep, whose runs are its folders 0, 1, 2, ..., if ``points`` is above one.
        cwd: where the job runs: the folder of the submission.
        python: the interpreter.
        feeds: the job only queues what is left of the arrays in these folders, with the code of the run in ``folder``.
    """
    for path in (folder, cwd):
        if re.search(r"['\"\\\n]", str(path)):  # sbatch's header has no escape that all versions read alike
            what = f"The folder {str(path)!r} cannot be written into a batch script."
            why = "Its name has a quote, a backslash or a line break."
            raise UserError(what, why=why, fix="Use a folder with a simpler name.")
    run_dir = shlex.quote(str(folder))
    if points > 1:
        run_dir += '/"$SLURM_ARRAY_TASK_ID"'
    if is_part(folder):  # which has links to the runs
        run_dir = f'"$(readlink -f {run_dir})"'
    kind, _, name = (plan.environment or "").partition(":")
    place = str(cwd / Path(name).expanduser())
    if kind == "conda" and "/" not in name:
        place = name
    if kind in ("conda", "uv"):
        python = '"$python"'  # which the script finds
    else:
        python = shlex.quote(f"{place}/bin/python" if kind == "venv" else python)
    options = list(plan.srun)
    before = []
    shell = "bash"
    rank_python = python
    if plan.container is not None:
        folders = (whole(folder), cwd)
        shell = "sh"  # an image may have no other
        options += containers.srun_options(plan.container, folders, cwd)
        outside = containers.command(plan.container, folders, cwd, gpus=plan.gpus_per_node > 0)
        if outside:
            before.append(shlex.join(outside))
        before.append(shlex.join(containers.inside()) + ' PYTHONPATH="$TRAINKIT_RUN_DIR/code"')
        rank_python = shlex.quote(plan.container.python)
    return shell_template("batch_script.jinja").render(
        plan=plan, cwd=cwd, run_dir=run_dir, kind=kind, environment=place, python=python, option=_option,
        options=options, before=before, shell=shell, rank_python=rank_python, flags=" ".join(PYTHON_FLAGS), task=TASK,
        pickles=folder / ".submitit", check=CHECK, preflight_minutes=LIMIT_MINUTES, preflight_file=PREFLIGHT.name,
        requeue_file=REQUEUE.name, lost_file=LOST.name, silence_seconds=SILENCE_SECONDS,
        keep_freed_memory=KEEP_FREED_MEMORY, feeds=feeds,
    )  # fmt: skip


def _option(name: str, value: object) -> str:
    if value is None:
        return f"--{name}"
    return f"--{name}={shlex.quote(str(value))}"


# Submission

SBATCH_SECONDS = 300.0
"""The longest that sbatch may take, and scancel with a whole sweep; a caller on another machine may live until then."""
LATE_SECONDS = 120.0
"""Seconds after the end of sbatch in which its job may still appear: a busy controller takes it later."""
SEARCH_PAUSES = (0.0, 2.0, 4.0)
"""Seconds before each look for a job that sbatch has not spoken of."""
FULL = re.compile(r"\w*SubmitJob\w*|temporarily unable to accept job")
"""Words of sbatch about limits on jobs in the queue: MaxSubmitJobs, GrpSubmitJobs; MaxJobCount."""
_PATH = re.compile(r"(?<![^ ])/")
_SCRIPT = re.compile(r"/(submit|\.submitit/[^/]+)\.sbatch$")


class SbatchError(SchedulerError):
    """Error of an sbatch that has failed, or has not said which job it has queued."""

    is_answer = False
    """The scheduler, or sbatch before it has asked, has said no."""


def submit(
    folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, *, cwd: Path, env: Mapping[str, str]
) -> list[str]:
    """Queue the runs in ``folder`` as one job, or one array. Returns the job id of each.

    Raises:
        SchedulerError: there is no job, or nobody can tell.
    """
    script, token = _own_script(folder)
    for item in runs:
        events.submitting(item, NAME, token)
    try:
        job_ids = pickled(folder, runs, function, lambda: sbatch(script, env))
    except SbatchError as error:
        return _despite(error, folder, runs)
    _write_down_all(runs, job_ids)
    return job_ids


def submit_tasks(
    folder: Path, tasks: Mapping[int, RunDir], words: Sequence[str], env: Mapping[str, str], *, feeder: str
) -> list[str]:
    """Queue these tasks of the array in ``folder``, whose pickles are there; see `submit`.

    Args:
        words: further options of sbatch.
        feeder: the job that the runs have waited for.
    """
    script, token = _own_script(folder)
    runs = list(tasks.values())
    for item in runs:
        events.submitting(item, NAME, token, feeder=feeder)
    try:
        with as_open_as(folder):
            job_id = sbatch(script, env, *words)
    except SbatchError as error:
        return _despite(error, folder, runs)
    job_ids = [job_id]
    if not (folder / "config.yaml").is_file():
        job_ids = [f"{job_id}_{index}" for index in tasks]
    _write_down_all(runs, job_ids)
    return job_ids


def _own_script(folder: Path) -> tuple[Path, str]:
    """Make the path of the folder's script that only this submission gives to sbatch, and the token in it."""
    token = secrets.token_hex(4)
    script = folder / ".submitit" / f"{token}.sbatch"
    fileio.make_folder(script.parent, folder)
    fileio.link(script, "../submit.sbatch", folder)
    return script, token


def _write_down_all(runs: Sequence[RunDir], job_ids: Sequence[str]) -> None:
    for item, job_id in zip(runs, job_ids, strict=True):
        cut = history_of(item).cut_short
        if cut is not None:  # else it was found in the queue before this
            write_down(item, cut, [job_id])


def sbatch(script: Path, env: Mapping[str, str], *options: str) -> str:
    """Queue a script, without the variables of a job around this process. Returns the job's id.

    Args:
        options: they outrank those in the script.

    Raises:
        SbatchError: it failed; with its own words.
    """
    refusal = "sbatch refused the job."
    fix = "`--dry-run` shows what is submitted."
    try:
        answer = run("sbatch", "--parsable", *options, str(script), env=scrubbed(env), seconds=SBATCH_SECONDS)
    except NoAnswer as error:
        raise SbatchError(refusal, why=error.words, fix=fix) from None
    if answer.code:
        killed = answer.code < 0 or 128 < answer.code <= 192  # 255 is its own, for an option that it does not know
        failure = SbatchError(refusal, why=answer.words.replace("sbatch: ", ""), fix=fix)
        is_refused = FULL.search(answer.words) or not NO_ANSWER.search(answer.words)
        failure.is_answer = not killed and bool(answer.err.strip()) and bool(is_refused)
        raise failure
    job_id = job_id_in(answer.out)
    if not job_id:
        words = repr(terminal.one_line(answer.out, 200))
        raise SbatchError("sbatch gave no job id.", why=words, fix="`python -m jobs.status` looks for it.")
    return job_id


def _despite(error: SbatchError, folder: Path, runs: Sequence[RunDir]) -> list[str]:
    """Find the jobs that are there although sbatch has failed: a busy scheduler may take one and not answer.

    Raises:
        SchedulerError: there are none; where nobody can tell, the runs' records say so.
    """
    complaint = ""
    for pause in SEARCH_PAUSES:
        time.sleep(pause)
        lives = [(item, history_of(item)) for item in runs]
        _, complaint = search([(item, life) for item, life in lives if life.cut_short])
        job_ids = []
        for item in runs:
            life = history_of(item)
            if life.submission is not None and not life.cut_short:
                job_ids.append(life.submission.job_id)
        if len(job_ids) == len(runs):
            terminal.warn(f"sbatch failed ({error.why}), but queued the job: {job_ids[0]}.")
            return job_ids
        if complaint or error.is_answer:
            break
    if error.is_answer and (not complaint or "Batch job submission failed" in error.why):
        full = FULL.search(error.why)
        for item in runs:
            events.refused(item, error.why, full=full is not None)
        if full is not None:
            fix = "Repeat the command when some of your jobs have ended."
            raise QueueFullError(error.what, why=f"The queue takes no more jobs now ({full[0]}).", fix=fix)
        for index in range(len(runs)):
            (folder / ".submitit" / unclaimed(index)).unlink(missing_ok=True)
        raise SchedulerError(error.what, why=error.why, fix=_way_out(error.why))
    for item in runs:
        events.unanswered(item, error.why)
    asked = f"SLURM cannot be asked: {complaint}" if complaint else "SLURM has no job of it yet"
    what = f"It is unknown whether SLURM has accepted the job of {folder}."
    fix = f"Do not submit it again: `{terminal.command('status', folder)}` looks for the job, "
    fix += f"`{terminal.command('cancel', folder)}` ends it if it appears."
    raise SchedulerError(what, why=f"sbatch said: {error.why}. {asked}.", fix=fix)


def _way_out(words: str) -> str:
    """Advise what to change of a job that sbatch has refused with these words."""
    fix = "`--dry-run` shows everything that is submitted, with its source."
    if re.search("account|assoc|qos", words, re.IGNORECASE):
        fix = f"`python -m jobs.cluster show` lists your accounts and QOS; {fix}"
    return fix


def search(cut_short: Sequence[tuple[RunDir, RunHistory]]) -> tuple[dict[Path, JobState], str]:
    """Look for the jobs of these runs, with one call or two, and write down those that are there.

    Returns the states of the others, and why the queue has not answered.
    """
    complaint = ""
    scripts = {}
    try:
        scripts = queued_scripts()
    except NoAnswer as error:
        complaint = error.words
    found = {item.path: _jobs_of(item, life, scripts) for item, life in cut_short}
    if not all(found.values()):  # it may have ended, and be forgotten
        since = min(life.cut_short.time for _, life in cut_short if life.cut_short is not None) - 60
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(max(since, 0)))
        me = str(os.geteuid())
        with suppress(NoAnswer):  # no accounting, or older than 21.08
            accounts = read_scripts(told("sacct", "-X", "-n", "-P", "-u", me, "-S", start, "-o", "JobID,SubmitLine"))
            found = {item.path: found[item.path] or _jobs_of(item, life, accounts) for item, life in cut_short}
    lost = {}
    for item, life in cut_short:
        assert life.cut_short is not None
        job_ids = found[item.path]
        if not job_ids:
            lost[item.path] = _without(life.cut_short, complaint)
            continue
        reason = _not_adopted(item, life.cut_short, job_ids)
        if reason:
            lost[item.path] = JobState("UNKNOWN", job_ids[-1], NAME, reason)
    return lost, complaint


def _not_adopted(run: RunDir, cut: Submission, job_ids: Sequence[str]) -> str:
    """Write down the jobs of a submission. Returns why not, if that is impossible."""
    is_mine = False
    with suppress(OSError):
        is_mine = run.events.stat().st_uid == os.geteuid()
    if not is_mine:
        return "you cannot write its record"
    try:
        write_down(run, cut, job_ids, adopted=True)
    except NoAnswer as error:
        return f"it should be cancelled, but scancel fails: {error.words}"
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
    """Ask for the script of each job that this user has in the queue, see `read_scripts`. Raises NoAnswer."""
    return read_scripts(told("squeue", "-h", "-r", "-t", "all", "-u", str(os.geteuid()), "-o", "%i|%o"))


def read_scripts(text: str) -> dict[str, str]:
    """Map job ids to scripts, with what stands before and after them.

    Args:
        text: from ``squeue -h -r -o "%i|%o"`` or ``sacct -X -n -P -o JobID,SubmitLine``.
    """
    found = {}
    for line in text.splitlines():
        job_id, bar, script = line.strip().partition("|")
        if bar and job_id and "[" not in job_id:
            found[job_id] = script
    return found


def _jobs_of(folder: RunDir, life: RunHistory, scripts: Mapping[str, str]) -> list[str]:
    """List the run's jobs that its record does not know, oldest first."""
    known = {item.job_id for item in life.submissions}
    script = "/submit.sbatch"
    if life.cut_short is not None and life.cut_short.token:
        script = f"/.submitit/{life.cut_short.token}.sbatch"
    own = []
    for job_id, line in scripts.items():
        if job_id not in known and line.endswith(script) and is_job_of(folder, job_id, line):
            own.append(job_id)
    return sorted(own, key=lambda job_id: int(job_id.partition("_")[0]))


def is_job_of(folder: RunDir, job_id: str, line: str) -> bool:
    """Return True if the script that SLURM was given, in a line of `read_scripts`, is the run's.

    A task of an array is the run that lies, or is linked, beside the array's script under the task's number.
    """
    number, _, task = job_id.partition("_")
    script = _SCRIPT.search(line)
    if script is None or not number.isdecimal():
        return False
    # Words may stand before the script, and its own path may have spaces: each slash after one may begin it.
    here = os.path.realpath(folder.path)
    for match in _PATH.finditer(line, 0, script.start()):
        place = Path(line[match.start() : script.start()], task)
        if os.path.realpath(place) == here:
            return True
    return False


def _without(cut: Submission, complaint: str) -> JobState:
    """Judge a submission whose job was not found: its command may be at work still, or SLURM be late."""
    process = cut.process
    age = time.time() - cut.time
    is_here = process is not None and process.is_here()
    what = f"sbatch got no answer ({cut.unanswered})" if cut.unanswered else "its submission was interrupted"
    if process is not None and is_here and process.is_alive() and not cut.unanswered:
        what = f"process {process.pid} is submitting it now"
    elif complaint:
        what += f", and SLURM cannot be asked: {complaint}"
    elif not cut.unanswered and not is_here and (process is None or age < SBATCH_SECONDS):
        where = process.host if process else "an unknown machine"
        what = f"it is being submitted on {where}, or its submission was interrupted"
    elif age < LATE_SECONDS:
        what += f"; SLURM has no job of it, but one may appear within {LATE_SECONDS - age:.0f} s"
        if cut.cancelled:
            what += ", which would be cancelled"
    else:
        return JobState("NOT SUBMITTED", reason=f"{what}, and SLURM has no job of it")
    return JobState("UNKNOWN", "", NAME, what)
