"""SLURM: jobs of a cluster, for the commands of users and for the script of a job itself.

The texts that it is given, the batch script of a run or of a sweep and ``--dependency``, are the same for a dry run and
for the submission after it.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainkit import fileio, process, terminal
from trainkit.errors import RefusedError, SchedulerError, UserError
from trainkit.launch import containers
from trainkit.launch.batch_job import CONTINUE
from trainkit.launch.plan import Plan
from trainkit.launch.submission import LIMIT_MINUTES, PART, is_part, whole
from trainkit.process import NoAnswer, scrubbed
from trainkit.ranks import restarts
from trainkit.run.events import RunHistory, cancelled, history_of, job_of, submitted
from trainkit.run.folder import PREFLIGHT, REQUEUE, RunDir
from trainkit.schedulers import base, slurm_submission
from trainkit.schedulers.base import BEGIN, TASK, Answer, Job, JobState, NoCluster, NodeState, OwnJob, Place, Start
from trainkit.schedulers.slurm_submission import NAME, is_job_of, job_id_in, names, persist, queued_scripts, run, told
from trainkit.site.profile import Partition, read_nodes, read_partitions

RESOURCES = (
    "nodes", "ntasks-per-node", "gpus-per-node", "gres", "cpus-per-task", "mem", "partition", "account", "qos",
    "constraint", "nodelist", "exclude", "reservation", "job-name",
)  # fmt: skip
"""Directives that decide which nodes a job has and what a rank gets of them. The rest of a plan is about trainings."""
Find = Callable[[str], Sequence[RunDir]]
CHECK = BEGIN + "import runpy; runpy.run_module('trainkit.distributed.health', run_name='__main__')"
ARGUMENTS = "TRAINKIT_ARGUMENTS"
"""Environment variable of the templates: the preset and the settings that sbatch was given, one a line."""
_DEFAULT_ARRAY = 1001
_NO_CLUSTER = "Could not establish a configuration source"
_SQUEUE, _SACCT = "%i|%T|%r|%M|%N|%S", "JobID,State,ExitCode,NodeList"
# What scancel, and the controller, say of a job that it need not end.
_OVER = re.compile(r"invalid job id|already (completing|completed)", re.IGNORECASE)
_KEY = "launch.dependency"
_JOB_ID = re.compile(r"\d+(_(\d+|\*))?(\+\d+)?")  # 4711, 4711_3, and sbatch's +MINUTES


def batch_script(plan: Plan, folder: Path, cwd: Path, points: int = 1, *, python: str = sys.executable) -> str:
    """The whole script; its text is in batch_script.jinja.

    Args:
        folder: folder of the run; of the sweep, whose runs are its folders 0, 1, 2, ..., if ``points`` is above one.
        cwd: where the job runs: the folder of the submission.
        python: the interpreter.
    """
    import jinja2  # most commands do without

    for path in (folder, cwd):
        # sbatch's header has no escape that all versions read alike.
        if any(char in str(path) for char in "'\"\\\n"):
            what = f"The folder {str(path)!r} cannot be written into a batch script."
            why = "Its name holds a quote, a backslash or a line break."
            raise UserError(what, why=why, fix="Use a folder with a plainer name.")
    run_dir = shlex.quote(str(folder)) + ('/"$SLURM_ARRAY_TASK_ID"' if points > 1 else "")
    if is_part(folder):  # which has links to the runs
        run_dir = f'"$(readlink -f {run_dir})"'
    kind, _, name = (plan.environment or "").partition(":")
    place = name if kind == "conda" and "/" not in name else str(cwd / Path(name).expanduser())
    python = {"": shlex.quote(python), "venv": shlex.quote(f"{place}/bin/python")}.get(kind, '"$python"')
    options, before, shell, rank_python = list(plan.srun), [], "bash", python
    if plan.container is not None:
        folders, shell = (whole(folder), cwd), "sh"  # an image may have no other
        options += containers.srun_options(plan.container, folders, cwd)
        outside = containers.command(plan.container, folders, cwd, gpus=plan.gpus_per_node > 0)
        before = [shlex.join(outside)] if outside else []
        before += [shlex.join(containers.inside()) + ' PYTHONPATH="$TRAINKIT_RUN_DIR/code"']
        rank_python = shlex.quote(plan.container.python)
    templates = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    templates.filters["quote"] = lambda value: shlex.quote(str(value))
    text = fileio.read_text(Path(__file__).with_name("batch_script.jinja"), follow=True)
    return templates.from_string(text).render(
        plan=plan,
        cwd=cwd,
        run_dir=run_dir,
        kind=kind,
        environment=place,
        python=python,
        option=_option,
        options=options,
        before=before,
        shell=shell,
        rank_python=rank_python,
        task=TASK,
        pickles=folder / ".submitit",
        check=CHECK,
        preflight_minutes=LIMIT_MINUTES,
        preflight_file=PREFLIGHT.name,
        requeue_file=REQUEUE.name,
    )


def _option(name: str, value: object) -> str:
    return f"--{name}" if value is None else f"--{name}={shlex.quote(str(value))}"


# What a job waits for


def with_job_ids(plan: Plan, find: Find) -> Plan:
    """The plan with the names of runs in its dependency replaced by their job ids.

    What a run by its own record has already met falls away: SLURM forgets the ids of ended jobs.

    Args:
        find: the run of a name, or all runs of a sweep; raises UserError for a name that there is none of.

    Raises:
        UserError: a name of no run, or of one that SLURM does not know.
        RefusedError: it will never come true.
    """
    directives = []
    for item in plan.directives:
        if item.name == "dependency" and item.value is not None:
            if not (text := translated(str(item.value), find)):
                continue
            if text != item.value:
                item = replace(item, value=text, reason=f"the jobs of {item.value}")
        directives.append(item)
    return replace(plan, directives=tuple(directives))


def translated(text: str, find: Find) -> str:
    """A dependency with job ids for the names in it; empty if nothing is left to wait for."""
    any_of = "?" in text  # sbatch takes commas (all of them) or question marks (any of them), and not both
    kept = []
    for term in re.split(r"[,?]", text):
        kind, colon, rest = term.partition(":")
        ids = [_ids(kind, word, find) for word in rest.split(":")] if colon else []
        if any_of and [] in ids:
            return ""
        left = [job_id for found in ids for job_id in found]
        if left or not colon:
            kept.append(":".join([kind, *left]))
    return ("?" if any_of else ",").join(kept)


def _ids(kind: str, word: str, find: Find) -> list[str]:
    """Job ids of one word; none if what is awaited has come true."""
    if _JOB_ID.fullmatch(word):  # also where a run is called so, which ./4711 names
        return [word]
    runs = find(word)
    ids = [_job_id(run) for run in runs if not _is_met(kind, run)]
    arrays = {job_id.partition("_")[0] for job_id in ids}
    return list(arrays) if len(arrays) == 1 and len(ids) == len(runs) else ids


def _is_met(kind: str, run: RunDir) -> bool:
    life = history_of(run)
    ended = "COMPLETED" if life.finished else life.submission.ended if life.submission is not None else None
    if ended is None:
        return False
    if {"afterok": ended == "COMPLETED", "afternotok": ended != "COMPLETED"}.get(kind, True):
        return True
    fix = f"`{terminal.command('resume', run.path)}` first, or use afterany:{run.name}."
    fix = fix if kind == "afterok" else "Leave the dependency out."
    raise RefusedError(f"{kind}:{run.name} will never come true.", why=f"{run.name} is {ended}.", fix=fix, key=_KEY)


def _job_id(run: RunDir) -> str:
    submission = history_of(run).submission
    if submission is not None and base.built_in(submission.executor).batch and submission.job_id:
        return submission.job_id
    why = "It was never submitted." if submission is None else f"It runs by the executor {submission.executor}."
    fix = "Name a run that was submitted to SLURM, or leave the dependency out."
    raise UserError(f"No job can wait for {run.name}: it has no job in SLURM.", why=why, fix=fix, key=_KEY)


# The scheduler


class Slurm(base.Scheduler):
    """Jobs of a cluster."""

    name, title, batch, witness = NAME, "SLURM", True, "squeue, sacct"
    tools = ("squeue", "sacct", "sinfo", "scontrol", "sshare", "sstat")

    def is_here(self, env: Mapping[str, str]) -> bool:
        return shutil.which("sbatch", path=env.get("PATH")) is not None

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
            why = "sbatch is here, but configured for no cluster."
            raise NoCluster("SLURM is not configured.", why=why, fix="Set SLURM_CONF.") from None

    def largest_array(self) -> int:
        """Its indices count from 0, and MaxArraySize is one more than the highest; SLURM's default if it says none."""
        with suppress(NoAnswer):
            config = run("scontrol", "show", "config").shown().require()
            if size := re.search(r"^MaxArraySize\s*=\s*(\d{1,9})", config, flags=re.MULTILINE):
                return max(int(size[1]), 1)
        return _DEFAULT_ARRAY

    def questions(self, user: str, account_fields: str) -> dict[str, tuple[str, ...]]:
        return {
            "config": ("scontrol", "show", "config"),
            "partitions": ("scontrol", "show", "partition", "-o"),
            "nodes": ("scontrol", "show", "node", "-o"),
            "accounts": ("sacctmgr", "-nP", "show", "user", user, "withassoc", f"format={account_fields}"),
            "qos": ("sacctmgr", "-nP", "show", "qos", "format=Name,MaxWall,MaxTRESPU"),
        }

    def ask(self, command: Sequence[str], env: Mapping[str, str]) -> process.Answer:
        return run(*command, env=env).shown()

    def has_pyxis(self, env: Mapping[str, str] | None = None) -> bool | None:
        """Whether srun has the options that pyxis adds, by its own help, which asks nobody; None if it does not say."""
        with suppress(NoAnswer):
            said = run("srun", "--help", env=env)
            return None if said.code else "--container-image" in said.out + said.err
        return None

    script = staticmethod(batch_script)
    with_job_ids = staticmethod(with_job_ids)
    submit = staticmethod(slurm_submission.submit)

    def earliest_start(self, script: str, partition: str, env: Mapping[str, str]) -> Start:
        try:
            answer = run("sbatch", "--test-only", f"--partition={partition}", text=script, env=scrubbed(env))
        except NoAnswer as error:
            return Start(refusal=error.words)
        return slurm_submission.read_start(answer.err + answer.out)

    def on_its_nodes(self, plan: Plan, command: Sequence[str], minutes: int) -> list[str]:
        options = [f"--{item.name}={item.value}" for item in plan.directives if item.name in RESOURCES]
        options += [f"--{key}" + (f"={value}" if value else "") for key, value in plan.srun]
        # A rank or a node that fails is a finding, and must not end the others.
        step = ["srun", *options, f"--time={minutes}", "--kill-on-bad-exit=0", "--no-kill", *command]
        return ["bash", "-c", "\n".join([*plan.setup, f"exec {shlex.join(step)}"])] if plan.setup else step

    def adopt(self, cut_short: Sequence[tuple[RunDir, RunHistory]]) -> Mapping[Path, JobState]:
        return slurm_submission.search(cut_short)[0]

    def own(self, jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
        """Those whose script, as SLURM has it, is the run's."""
        with suppress(NoAnswer):
            scripts = queued_scripts()
            return [(run, job) for run, job in jobs if is_job_of(run, job.job_id, scripts.get(job.job_id, ""))]
        return []

    def states(self, jobs: Sequence[Job]) -> Answer:
        """By squeue, and sacct for what it has forgotten: two commands at most."""
        ids = {job.submission.job_id for job in jobs}
        complaint, has_answered, commands = "", True, 1
        found: dict[str, JobState] = {}
        try:  # `-t all` also shows jobs that have just ended, with or without accounting
            queue = told("squeue", "-h", "-r", "-t", "all", "-j", ",".join(sorted(ids)), "-o", _SQUEUE)
            found = slurm_submission.read_squeue(queue)
        except NoAnswer as error:
            if "invalid job id" not in error.words.lower():  # which only means that the queue has forgotten it
                complaint, has_answered = error.words, False
        # An ended job's own word is in the accounts: squeue shows COMPLETING and forgets.
        wanted = {job.submission.job_id for job in jobs if job.newest or not has_answered}
        if missing := wanted - found.keys():
            commands = 2
            try:
                accounts = told("sacct", "-X", "-n", "-P", "-D", "-j", ",".join(sorted(missing)), "-o", _SACCT)
                for job_id, state in slurm_submission.read_sacct(accounts).items():
                    if job_id in missing:
                        found[job_id] = state if has_answered else _doubted(state)
            except NoAnswer as error:
                forgotten = f"the queue has forgotten it, and there is no accounting here ({error.words})"
                complaint = complaint or forgotten
        return Answer([found.get(job.submission.job_id) for job in jobs], has_answered, complaint, commands)

    def cancel(self, jobs: Sequence[tuple[RunDir, JobState]], ended: Callable[[RunDir, JobState], None]) -> None:
        """Every job in one call; which it was is written down before anything is said against others of them."""
        ids = list(dict.fromkeys(state.job_id for _, state in jobs))
        try:
            answer = run("scancel", *ids)
        except NoAnswer as error:
            raise _not_cancelled(ids, error.words) from None
        # One line for each job that it could not end; one that has ended already needs none.
        lines = [line for line in answer.err.splitlines() if line.strip() and not _OVER.search(line)]
        refused = {word[0] for line in lines for word in re.finditer(r"\w+(\+\d+)?", line) if word[0] in ids}
        if answer.code and lines and not refused:
            refused = set(ids)
        for folder, state in jobs:
            if state.job_id not in refused:
                cancelled(folder, state.job_id)
                ended(folder, state)
        if refused:
            raise _not_cancelled(sorted(refused), terminal.one_line(" ".join(lines), 2000))

    def by_hand(self, run: RunDir, job: JobState) -> str:
        return f"`scancel {job.job_id}`."

    def at_node(self, host: str) -> str:
        return f"srun -N1 -n1 -w {shlex.quote(host)} " if host else ""

    def shows_memory(self, job_id: str) -> str:
        return f"sacct -j {job_id} -o NodeList,MaxRSS,ReqMem"

    def place(self, env: Mapping[str, str]) -> Place:
        nodelist, partition = env.get("SLURM_JOB_NODELIST", ""), env.get("SLURM_JOB_PARTITION", "")
        needed = int(env.get("SLURM_JOB_NUM_NODES", "1"))
        return Place(job_of(env), names(nodelist), nodelist, partition, needed, restarts(env))

    def claim(self, run: RunDir, env: Mapping[str, str]) -> None:
        """Give this job's pickle its name, if the command that queued it was killed before it could; or end the job, if
        it was cancelled before anybody knew it."""
        cut = history_of(run).cut_short
        if cut is not None and cut.cancelled:
            with suppress(NoAnswer):
                slurm_submission.write_down(run, cut, [job_of(env)])
            return
        index = env.get("SLURM_ARRAY_TASK_ID")
        for folder in _folders(run, index):
            mine = folder / ".submitit" / f"{job_of(env)}_submitted.pkl"
            found = mine.with_name(base.unclaimed(int(index or 0)))
            if not mine.exists() and found.is_file():
                with suppress(FileNotFoundError):  # it is just being renamed
                    fileio.copy(found, mine, folder)

    def own_job(self, job_id: str) -> OwnJob:
        answer = _lines("squeue", "-h", "-j", job_id, "-o", "%T|%x|%n|%r") or [""]
        state, excluded, required, reason, *_ = (answer[0] + "|||").split("|")
        return OwnJob(state, names(excluded), names(required), reason)

    def nodes(self, partition: str) -> dict[str, NodeState]:
        where = ["-p", partition] if partition else []
        lines = _lines("sinfo", "-h", "-N", *where, "-o", "%N %t %G %f")
        rows = [words for line in lines if len(words := line.split(None, 2)) > 1]
        return {words[0]: NodeState(words[1], "".join(words[2:])) for words in rows}

    def restarted(self, nodes: Sequence[str], since: float) -> dict[str, str]:
        found = {}
        for line in _lines("scontrol", "show", "node", "-o", ",".join(nodes)) if nodes else []:
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

    def next_link(self, run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
        index = env.get("SLURM_ARRAY_TASK_ID")
        old = job_of(env)
        pickle = f".submitit/{old}_submitted.pkl"
        folder = next((folder for folder in _folders(run, index) if (folder / pickle).is_file()), run.path)
        if not (script := folder / "submit.sbatch").is_file():
            return _queue_template(run, excluded, env)
        name = run.path.name if index is None else f"{run.path.parent.name}-{run.path.name}"
        more = [f"--exclude={','.join(excluded)}"] if excluded else []
        more += [] if index is None else [f"--array={index}"]
        # The run's own name, so that singleton makes it wait for other links of this chain and for nobody else.
        new = _queue_behind(old, name, [*more, str(script)], env=scrubbed(env), cwd=folder)
        new += "" if index is None else f"_{index}"
        # Before this job ends, so before that one starts.
        fileio.copy(folder / pickle, folder / f".submitit/{new}_submitted.pkl", folder)
        submitted(run, NAME, new, continues=old)
        return new


def _lines(*command: str) -> list[str]:
    """What it prints, asked again and again; nothing where it does not answer, which is no reason to lose a run."""
    with suppress(NoAnswer):
        return persist(*command).splitlines()
    return []


def _doubted(state: JobState) -> JobState:
    """By the accounts alone: SLURM may have put it back into the queue since."""
    if state.state not in ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REQUEUED"):
        return state
    reason = f"the accounts say {state.state}, and the queue, to which it may have returned, does not answer"
    return replace(state, state="UNKNOWN", reason=reason)


def _not_cancelled(job_ids: Sequence[str], words: str) -> SchedulerError:
    fix = "The jobs go on. Give the same command again where and when the scheduler answers, as `squeue` shows."
    fix = "Only a job's owner may cancel it." if re.search(r"denied|permi(tted|ssion)", words, re.IGNORECASE) else fix
    return SchedulerError(f"Not cancelled: {', '.join(job_ids)}.", why=f"{words}.", fix=fix)


def _folders(run: RunDir, index: str | None) -> list[Path]:
    """Folders with the script of a job that is this run: the run's, or those of arrays whose task ``index`` it is."""
    if index is None:
        return [run.path]
    here, sweep = os.path.realpath(run.path), run.path.parent
    places = (sweep, *sweep.glob(f".submitit/{PART}*"))
    return [folder for folder in places if os.path.realpath(folder / index) == here]


def _queue_template(run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
    """A further job of a template: the script that sbatch was given, with its arguments and what SLURM has granted."""
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
    for name in ("ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem-per-node"):
        flags[name.replace("mem-per-node", "mem")] = env.get("SLURM_" + name.upper().replace("-", "_"), "")
    flags["exclude"] = ",".join(excluded)
    given = [f"--{name}={text}" for name, text in flags.items() if text not in ("", "(null)", "N/A")]
    new = _queue_behind(
        old, run.path.name, ["--export=ALL", *given, script, *arguments],
        env={**scrubbed(env), CONTINUE: str(run.path)}, cwd=Path(env.get("SLURM_SUBMIT_DIR", ".")),
    )  # fmt: skip
    submitted(run, NAME, new, continues=old)
    return new


def _queue_behind(old: str, name: str, words: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> str:
    """Queue a job of that name that waits for the end of an old one; its id."""

    def link() -> str:  # sbatch may have queued it and had no answer
        with suppress(NoAnswer):
            waiting = told("squeue", "-h", "-u", str(os.geteuid()), "-n", name, "-t", "PENDING", "-o", "%i|%E")
            jobs = [job for job in waiting.splitlines() if re.search(rf"afterany:{old}\b", job)]
            return jobs[0].split("|")[0].split("_")[0] if jobs else ""
        return ""

    command = ["sbatch", "--parsable", "--no-requeue", f"--job-name={name}", f"--dependency=afterany:{old},singleton"]
    answer = persist(*command, *words, env=env, cwd=cwd, done_already=link)
    if job_id := job_id_in(answer) or link():
        return job_id
    raise _no_job(f"sbatch gave no job id: {terminal.one_line(answer, 200)!r}")


def _no_job(words: str) -> NoAnswer:
    return NoAnswer("No further job was queued.", why=f"{words}.", fix="`jobs.resume` queues one.")


def build() -> base.Scheduler:
    """SLURM."""
    return Slurm()
