"""SLURM: jobs of a cluster, for the commands of users and for the script of a job itself.

The batch script of a run or of a sweep is the same for a dry run and for the submission after it.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainkit.cluster import scheduler, slurm_commands, slurm_dependency, slurm_feeding, slurm_submission
from trainkit.cluster.pickles import unclaimed
from trainkit.cluster.plan import CONTINUE, PART, Plan
from trainkit.cluster.ranks import restarts
from trainkit.cluster.scheduler import (
    ExpectedStart,
    Job,
    JobPlace,
    JobState,
    NoCluster,
    NodeState,
    OwnJob,
    QueueAnswer,
)
from trainkit.cluster.site import Partition, leading_number, read_nodes, read_partitions
from trainkit.cluster.slurm_commands import NAME, job_id_in, names, persist, run, told
from trainkit.cluster.slurm_submission import batch_script, is_job_of, queued_scripts
from trainkit.cluster.waits import DAYS, PastJob
from trainkit.common import fileio, process, terminal
from trainkit.common.errors import SchedulerError, UserError
from trainkit.common.process import NoAnswer, scrubbed
from trainkit.run.events import cancelled, job_of, submitted
from trainkit.run.folder import RunDir
from trainkit.run.history import RunHistory, history_of

RESOURCES = (
    "nodes", "ntasks-per-node", "gpus-per-node", "gres", "cpus-per-task", "mem", "partition", "account", "qos",
    "constraint", "nodelist", "exclude", "reservation", "job-name",
)  # fmt: skip
"""Directives that decide which nodes a job has and what a rank gets of them. The rest of a plan is about trainings."""
ARGUMENTS = "TRAINKIT_ARGUMENTS"
"""Environment variable of the templates: the preset and the settings that sbatch was given, one a line."""
_DEFAULT_ARRAY = 1001
_EXPEDITES = (25, 11)
"""The first version that has sbatch --requeue=expedite."""
_NO_CLUSTER = "Could not establish a configuration source"
# Words of scancel, and of the controller, about a job that it need not end.
_OVER = re.compile(r"invalid job id|already (completing|completed)", re.IGNORECASE)


class Slurm(scheduler.Scheduler):
    """Jobs of a cluster."""

    name = NAME
    title = "SLURM"
    batch = True
    replaces_nodes = True
    witness = "squeue, sacct"
    tools = ("squeue", "sacct", "sinfo", "scontrol", "sshare", "sstat")

    def is_here(self, env: Mapping[str, str]) -> bool:
        return shutil.which("sbatch", path=env.get("PATH")) is not None

    def expected(self, env: Mapping[str, str]) -> str:
        """In a job SLURM sets it itself, also for a container that has none of its programs."""
        if env.get("SLURM_CONF") and not job_of(env):
            return "SLURM_CONF"
        return ""

    def partitions(self, env: Mapping[str, str]) -> tuple[Partition, ...]:
        try:
            nodes = read_nodes(run("scontrol", "show", "node", "-o").shown().require())
            return read_partitions(run("scontrol", "show", "partition", "-o").shown().require(), nodes)
        except (ValueError, KeyError, UserError) as error:  # cut off, or of a version to come
            words = f"scontrol: {terminal.one_line(error)}"
            raise NoAnswer("No answer from scontrol.", why=f"{words}.", fix="Ask it by hand.") from None
        except NoAnswer as error:
            if _NO_CLUSTER not in error.words:
                raise
            # SLURM's packages alone make no cluster: such a machine runs jobs itself.
            why = "sbatch is installed, but not configured for a cluster."
            raise NoCluster("SLURM is not configured.", why=why, fix="Set SLURM_CONF.") from None

    def largest_array(self) -> int:
        """Its indices count from 0, and MaxArraySize is one more than the highest; SLURM's default if it says none."""
        with suppress(NoAnswer):
            size = leading_number(slurm_commands.configuration().get("MaxArraySize", ""))
            if size is not None:
                return max(size, 1)
        return _DEFAULT_ARRAY

    def questions(self, user: str, account_fields: str) -> dict[str, tuple[str, ...]]:
        return {
            "config": ("scontrol", "show", "config"),
            "partitions": ("scontrol", "show", "partition", "-o"),
            "nodes": ("scontrol", "show", "node", "-o"),
            "accounts": ("sacctmgr", "-nP", "show", "user", user, "withassoc", f"format={account_fields}"),
            "qos": ("sacctmgr", "-nP", "show", "qos", "format=Name,MaxWall,MaxTRESPU"),
        }

    def ask(self, command: Sequence[str], env: Mapping[str, str]) -> process.ProgramOutput:
        return run(*command, env=env).shown()

    def has_pyxis(self, env: Mapping[str, str] | None = None) -> bool | None:
        """Look for pyxis' options in srun's own help, which asks nobody; None if it does not say."""
        with suppress(NoAnswer):
            said = run("srun", "--help", env=env)
            if not said.code:
                return "--container-image" in said.out + said.err
        return None

    script = staticmethod(batch_script)
    with_job_ids = staticmethod(slurm_dependency.with_job_ids)
    submit = staticmethod(slurm_submission.submit)
    submit_later = staticmethod(slurm_feeding.submit_later)
    feed = staticmethod(slurm_feeding.feed)

    def earliest_start(self, script: str, partition: str, env: Mapping[str, str]) -> ExpectedStart:
        try:
            answer = run("sbatch", "--test-only", f"--partition={partition}", text=script, env=scrubbed(env))
        except NoAnswer as error:
            return ExpectedStart(refusal=error.words, answered=False)
        return slurm_commands.read_start(answer.err + answer.out)

    def past_jobs(self, partition: str, now: float) -> list[PastJob]:
        since = datetime.fromtimestamp(now - DAYS * 86400).isoformat(timespec="seconds")
        command = ["sacct", "-X", "-n", "-P", "-a", "-S", since, "-r", partition, "-o", slurm_commands.WAITS]
        return slurm_commands.read_waits(told(*command), now)

    def on_its_nodes(self, plan: Plan, command: Sequence[str], minutes: int) -> list[str]:
        options = [f"--{item.name}={item.value}" for item in plan.directives if item.name in RESOURCES]
        options += [f"--{key}={value}".removesuffix("=") for key, value in plan.srun]
        # A rank or a node that fails is a finding, and must not end the others.
        step = ["srun", *options, f"--time={minutes}", "--kill-on-bad-exit=0", "--no-kill", *command]
        if not plan.setup:
            return step
        return ["bash", "-c", "\n".join([*plan.setup, f"exec {shlex.join(step)}"])]

    def beside(
        self, job_id: str, nodes: Sequence[str], cpus: int | None, options: Sequence[tuple[str, str]], *,
        on_terminal: bool,
    ) -> list[str]:  # fmt: skip
        if "_" in job_id:  # srun takes no task of an array by that name
            job_id = told("squeue", "-h", "-j", job_id, "-o", "%A").strip() or job_id
        count = len(nodes)
        step = ["srun", "--overlap", f"--jobid={job_id}", f"--nodes={count}", f"--ntasks={count}"]
        step += [f"--nodelist={','.join(nodes)}", "--unbuffered", "--quiet"]
        if cpus:
            step.append(f"--cpus-per-task={cpus}")
        if on_terminal:
            step.append("--pty")
        return [*step, *(f"--{name}={value}" for name, value in options)]

    def adopt(self, cut_short: Sequence[tuple[RunDir, RunHistory]]) -> Mapping[Path, JobState]:
        return slurm_submission.search(cut_short)[0]

    def own(self, jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
        """Select the jobs whose script, as SLURM has it, is the run's."""
        with suppress(NoAnswer):
            scripts = queued_scripts()
            return [(run, job) for run, job in jobs if is_job_of(run, job.job_id, scripts.get(job.job_id, ""))]
        return []

    def states(self, jobs: Sequence[Job]) -> QueueAnswer:
        """Ask squeue, and sacct about what it has forgotten: two commands at most."""
        complaint = ""
        has_answered = True
        found: dict[str, JobState] = {}
        ids = {job.job_id for job in jobs}
        try:
            found = slurm_commands.queued(ids).those_of(ids)
        except NoAnswer as error:
            complaint = error.words
            has_answered = False
        # An ended job's own word is in the accounts: squeue shows COMPLETING and forgets.
        missing = [job for job in jobs if job.job_id not in found and (job.newest or not has_answered)]
        failed = [state for state in found.values() if state.reason == "NonZeroExitCode"]
        commands = 1
        if missing:
            commands = 2
            try:
                found |= _by_accounts(missing, has_answered=has_answered)
            except NoAnswer as error:
                if has_answered:
                    complaint = f"the queue has forgotten it, and there is no accounting here ({error.words})"
        elif len(failed) == 1:  # squeue has no code, and sacct will have half of it
            commands = 2
            code = slurm_commands.exit_code(failed[0].job_id)
            if code:
                found[failed[0].job_id] = replace(failed[0], reason=f"exit code {code}")
        return QueueAnswer([found.get(job.job_id) for job in jobs], has_answered, complaint, commands)

    def cancel(self, jobs: Sequence[tuple[RunDir, JobState]], ended: Callable[[RunDir, JobState], None]) -> None:
        """End every job in one call; those that it ended are written down before others are complained about."""
        ids = list(dict.fromkeys(state.job_id for _, state in jobs))
        try:
            answer = run("scancel", *ids, seconds=slurm_submission.SBATCH_SECONDS)
        except NoAnswer as error:
            raise _not_cancelled(ids, error.words) from None
        # One line for each job that it could not end; one that has ended already needs none.
        words = " ".join(line for line in answer.err.splitlines() if not _OVER.search(line)).strip()
        refused = set(re.split(r"[^\w+]+", words)) & set(ids)
        if answer.code and words and not refused:
            refused = set(ids)
        for folder, state in jobs:
            if state.job_id not in refused:
                cancelled(folder, state.job_id)
                ended(folder, state)
        if refused:
            raise _not_cancelled(sorted(refused), terminal.one_line(words, 2000))

    def by_hand(self, run: RunDir, job: JobState) -> str:
        return f"`scancel {job.job_id}`."

    def at_node(self, host: str) -> str:
        if not host:
            return ""
        return f"srun -N1 -n1 -w {shlex.quote(host)} "

    def peak_memory_mb(self, job_id: str) -> float | None:
        with suppress(NoAnswer):
            text = told("sacct", "-n", "-P", "-j", job_id, "--units=M", "-o", "JobID,NTasks,MaxRSS")
            return slurm_commands.read_peak_memory(text)
        return None

    def shows_memory(self, job_id: str) -> str:
        return f"sacct -j {job_id} -o NodeList,MaxRSS,ReqMem"

    def place(self, env: Mapping[str, str]) -> JobPlace:
        nodelist = env.get("SLURM_JOB_NODELIST", "")
        partition = env.get("SLURM_JOB_PARTITION", "")
        needed = int(env.get("SLURM_JOB_NUM_NODES", "1"))
        return JobPlace(job_of(env), names(nodelist), nodelist, partition, needed, restarts(env))

    def claim(self, run: RunDir, env: Mapping[str, str]) -> None:
        """Give this job's pickle its name, if the command that queued it was killed before it could.

        Ends the job instead if it was cancelled before anybody knew it.
        """
        cut = history_of(run).cut_short
        if cut is not None and cut.cancelled:
            with suppress(NoAnswer):
                slurm_submission.write_down(run, cut, [job_of(env)])
            return
        index = env.get("SLURM_ARRAY_TASK_ID")
        for folder in _folders(run, index):
            mine = folder / ".submitit" / f"{job_of(env)}_submitted.pkl"
            found = mine.with_name(unclaimed(int(index or 0)))
            if not mine.exists() and found.is_file():
                with suppress(FileNotFoundError):  # it is just being renamed
                    fileio.copy(found, mine, folder)

    def own_job(self, job_id: str) -> OwnJob:
        for line in _lines("squeue", "-h", "-j", job_id, "-o", "%T|%x|%n|%r|%N|%e"):
            state, excluded, required, reason, nodes, end, *_ = [*line.split("|"), *[""] * 5]
            ends_at = None
            with suppress(ValueError):  # "N/A", of a job without a limit
                ends_at = datetime.fromisoformat(end).timestamp()
            return OwnJob(state, names(excluded), names(required), reason, names(nodes), ends_at)
        return OwnJob()

    def nodes(self, partition: str) -> dict[str, NodeState]:
        where = ["-p", partition] if partition else []
        found = {}
        for line in _lines("sinfo", "-h", "-N", *where, "-o", "%N %t %G %f"):
            name, state, kind, *_ = [*line.split(None, 2), "", "", ""]
            if state:
                found[name] = NodeState(state, kind)
        return found

    def restarted(self, nodes: Sequence[str], since: float) -> dict[str, str]:
        found: dict[str, str] = {}
        if not nodes:
            return found
        for line in _lines("scontrol", "show", "node", "-o", ",".join(nodes)):
            fields = dict(word.partition("=")[::2] for word in line.split())
            for key, what in (("SlurmdStartTime", "its slurmd was started"), ("BootTime", "it was booted")):
                with suppress(ValueError):  # "None", of a node that has not answered yet
                    if datetime.fromisoformat(fields.get(key, "")).timestamp() > since:
                        found[fields.get("NodeName", "")] = f"{what} at {fields[key]}"
        return found

    def requeue(self, job_id: str) -> None:
        """SLURM ends the job's script then."""
        persist("scontrol", "requeue", job_id, patiently=True)

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """SLURM takes this from jobs that wait only."""
        persist("scontrol", "update", f"job={job_id}", f"ExcNodeList={','.join(nodes)}")

    def end_steps(self, job_id: str) -> None:
        """The batch script is a step as well, but not one with a number."""
        steps = [step for step in _lines("squeue", "-h", "-s", "-j", job_id, "-o", "%i") if step[-1:].isdecimal()]
        if steps:
            with suppress(NoAnswer):
                persist("scancel", "--signal=KILL", *steps)

    def resize(self, job_id: str, nodes: str, tasks: int) -> None:
        persist("scontrol", "update", f"job={job_id}", f"NumNodes={nodes}", f"NumTasks={tasks}")

    def can_expedite(self) -> str:
        """SLURM 25.11 has it, where the site allows it."""
        try:
            config = slurm_commands.configuration()
        except NoAnswer as error:
            return f"scontrol does not say which version is here: {error.words}"
        version = config.get("SLURM_VERSION", "unknown")
        number = re.match(r"(\d+)\.(\d+)", version)
        if number is None or (int(number[1]), int(number[2])) < _EXPEDITES:
            return f"it needs SLURM {_EXPEDITES[0]}.{_EXPEDITES[1]}, and this is {version}"
        if "enable_expedited_requeue" not in config.get("SlurmctldParameters", ""):
            return "the site does not allow it (SlurmctldParameters=enable_expedited_requeue)"
        return ""

    def next_link(self, run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
        index = env.get("SLURM_ARRAY_TASK_ID")
        old = job_of(env)
        pickle = f".submitit/{old}_submitted.pkl"
        folder = run.path
        for place in reversed(_folders(run, index)):
            if (place / pickle).is_file():
                folder = place
        script = folder / "submit.sbatch"
        if not script.is_file():
            return _queue_template(run, excluded, env)
        # The run's own name, so that singleton makes it wait for other links of this chain and for nobody else.
        name = run.path.name
        task = ""
        words = []
        if excluded:
            words.append(f"--exclude={','.join(excluded)}")
        if index is not None:
            name = f"{run.path.parent.name}-{run.path.name}"
            task = f"_{index}"
            words.append(f"--array={index}")
        new = _queue_behind(old, name, [*words, str(script)], env=scrubbed(env), cwd=folder) + task
        # Before this job ends, so before that one starts.
        fileio.copy(folder / pickle, folder / f".submitit/{new}_submitted.pkl", folder)
        submitted(run, NAME, new, continues=old)
        return new


def _lines(*command: str) -> list[str]:
    """Ask again and again; no lines where nobody answers, which is no reason to lose a run."""
    with suppress(NoAnswer):
        return persist(*command).splitlines()
    return []


def _by_accounts(jobs: Sequence[Job], *, has_answered: bool) -> dict[str, JobState]:
    """Ask the accounts about jobs that the queue does not list, or, unless it ``has_answered``, may list."""
    accounts = slurm_commands.accounted({job.job_id for job in jobs})
    found = {}
    for job in jobs:
        job_id = job.job_id
        state = accounts.of(job_id)
        if state is None:
            # A task that is cancelled alone before it begins leaves no row, while others of its array have some.
            has_begun = len(job.run.attempts()) > job.submission.attempts_before
            if has_answered and accounts.knows_array(job_id) and not has_begun:
                reason = "it has not started, and SLURM lists only other tasks of its array"
                found[job_id] = JobState("CANCELLED", job_id, NAME, reason)
            continue
        if not has_answered and state.state in ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REQUEUED"):
            reason = f"the accounting says {state.state}, but the queue, where it may be again, does not answer"
            state = replace(state, state="UNKNOWN", reason=reason)
        found[job_id] = state
    return found


def _not_cancelled(job_ids: Sequence[str], words: str) -> SchedulerError:
    fix = "Repeat the command where and when the scheduler answers; `squeue` shows which jobs continue."
    if re.search(r"denied|permi(tted|ssion)", words, re.IGNORECASE):
        fix = "Only a job's owner may cancel it."
    return SchedulerError(f"Not cancelled: {', '.join(job_ids)}.", why=f"{words}.", fix=fix)


def _folders(run: RunDir, index: str | None) -> list[Path]:
    """List folders with the script of this run's job: its own, or those of arrays whose task ``index`` it is."""
    if index is None:
        return [run.path]
    here = os.path.realpath(run.path)
    sweep = run.path.parent
    places = (sweep, *sweep.glob(f".submitit/{PART}*"))
    return [folder for folder in places if os.path.realpath(folder / index) == here]


def _queue_template(run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
    """Queue a template again: the script that sbatch was given, with its arguments and what SLURM has granted."""
    old = job_of(env)
    *granted, command = persist("squeue", "-h", "-j", old, "-o", "%a|%P|%q|%l|%D|%f|%o").split("|", 6)
    if len(granted) < 6:
        raise _no_job(f"squeue does not say what job {old} is: {terminal.one_line(command, 200)}")
    if ARGUMENTS in env:
        arguments = env[ARGUMENTS].splitlines()
        script = command.removesuffix(" " + " ".join(arguments))  # before 23.11 SLURM adds them, without quotes
    else:  # a copy of the template from before
        script, *arguments = command.split() or [""]
    if not os.path.isfile(script):
        raise _no_job(f"there is no {terminal.one_line(script) or 'script'} to be queued again")
    flags = dict(zip(("account", "partition", "qos", "time", "nodes", "constraint"), granted, strict=True))
    for name in ("ntasks-per-node", "gpus-per-node", "cpus-per-task"):
        flags[name] = env.get("SLURM_" + name.upper().replace("-", "_"), "")
    flags["mem"] = env.get("SLURM_MEM_PER_NODE", "")
    flags["exclude"] = ",".join(excluded)
    given = [f"--{name}={text}" for name, text in flags.items() if text not in ("", "(null)", "N/A")]
    new = _queue_behind(
        old, run.path.name, ["--export=ALL", *given, script, *arguments],
        env={**scrubbed(env), CONTINUE: str(run.path)}, cwd=Path(env.get("SLURM_SUBMIT_DIR", ".")),
    )  # fmt: skip
    submitted(run, NAME, new, continues=old)
    return new


def _queue_behind(old: str, name: str, words: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> str:
    """Queue a job of that name that waits for the end of an old one. Returns its id."""

    def link() -> str:  # sbatch may have queued it and had no answer
        with suppress(NoAnswer):
            waiting = told("squeue", "-h", "-u", str(os.geteuid()), "-n", name, "-t", "PENDING", "-o", "%i|%E")
            for job in waiting.splitlines():
                if re.search(rf"afterany:{old}\b", job):
                    return job.partition("|")[0].partition("_")[0]
        return ""

    command = ["sbatch", "--parsable", "--no-requeue", f"--job-name={name}", f"--dependency=afterany:{old},singleton"]
    answer = persist(*command, *words, env=env, cwd=cwd, done_already=link)
    job_id = job_id_in(answer) or link()
    if job_id:
        return job_id
    raise _no_job(f"sbatch gave no job id: {terminal.one_line(answer, 200)!r}")


def _no_job(words: str) -> NoAnswer:
    return NoAnswer("No follow-up job was queued.", why=f"{words}.", fix="`jobs.resume` queues one.")


def build() -> scheduler.Scheduler:
    """SLURM."""
    return Slurm()
