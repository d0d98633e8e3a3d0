"""The texts that SLURM is given: the batch script of a run or of a sweep, and ``--dependency``.

Pure: a script is the same for a dry run and for the submission after it.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit import terminal
from trainkit.errors import RefusedError, UserError
from trainkit.launch import containers
from trainkit.launch.plan import Plan
from trainkit.launch.submission import LIMIT_MINUTES, is_part, whole
from trainkit.run.events import history_of
from trainkit.run.folder import PREFLIGHT, REQUEUE, RunDir
from trainkit.schedulers.base import BEGIN, TASK, built_in

RESOURCES = (
    "nodes", "ntasks-per-node", "gpus-per-node", "gres", "cpus-per-task", "mem", "partition", "account", "qos",
    "constraint", "nodelist", "exclude", "reservation", "job-name",
)  # fmt: skip
"""Directives that decide which nodes a job has and what a rank gets of them. The rest of a plan is about trainings."""
Find = Callable[[str], Sequence[RunDir]]
CHECK = BEGIN + "import runpy; runpy.run_module('trainkit.distributed.health', run_name='__main__')"

_END = {True: 'job end "$rc"', False: 'job end "$rc" --no-requeue', "chain": 'job end "$rc" --chain'}


def batch_script(plan: Plan, folder: Path, cwd: Path, points: int = 1, *, python: str = sys.executable) -> str:
    """The whole script.

    Args:
        folder: folder of the run; of the sweep, whose runs are its folders 0, 1, 2, ..., if ``points`` is above one.
        cwd: where the job runs: the folder of the submission.
        python: the interpreter.
    """
    _check_path(folder)
    _check_path(cwd)
    run = shlex.quote(str(folder)) + ('/"$SLURM_ARRAY_TASK_ID"' if points > 1 else "")
    if is_part(folder):  # which has links to the runs
        run = f'"$(readlink -f {run})"'
    lines = ["#!/bin/bash"]
    for item in plan.directives:
        lines.append(f"#SBATCH --{item.name}" + ("" if item.value is None else f"={shlex.quote(str(item.value))}"))
    lines += ["", "set -euo pipefail", f"cd {shlex.quote(str(cwd))}"]
    lines += ["# Where jobs are submitted with --export=NONE, srun would start the ranks without a PATH."]
    lines += ["export SLURM_EXPORT_ENV=ALL"]
    activate, interpreter = activation(plan.environment, cwd, python)
    modules = [_FIND_MODULES, f"module load {shlex.join(plan.modules)}"] if plan.modules else []
    if setup := [*modules, *plan.setup, *activate]:
        # Site set-up scripts (module, conda) are not written for `set -u`.
        lines += ["", "set +u", *setup, "set -u"]
    lines += [
        "",
        f"export TRAINKIT_RUN_DIR={run}",
        "# The snapshot of the code, and not what lies in the folder of the submission by now.",
        'export PYTHONPATH="$TRAINKIT_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"',
        'if [ ! -d "$TRAINKIT_RUN_DIR/code" ]; then  # the copy that runs share is gone',
        '    rm -f "$TRAINKIT_RUN_DIR/code"',
        '    unpacked=$(mktemp -d "$TRAINKIT_RUN_DIR/.partial-code.XXXXXXXX")  # whole, or not there at all',
        f'    (cd / && {interpreter} -m zipfile -e "$TRAINKIT_RUN_DIR/code.zip" "$unpacked/code")',
        '    mv -T "$unpacked/code" "$TRAINKIT_RUN_DIR/code"',
        '    rmdir "$unpacked"',
        "fi",
        f'job() {{ (cd "$TRAINKIT_RUN_DIR/code" && {interpreter} -m trainkit.launch.batch_job "$@"); }}',
        "begun=$(job begin)",
        'eval "$begun"  # the attempt, where its ranks meet, and their secret',
        'logs="$TRAINKIT_RUN_DIR/logs/$TRAINKIT_ATTEMPT"',
    ]
    cpus = '"$SLURM_CPUS_PER_TASK"' if plan.cpus_per_task else '"${SLURM_CPUS_PER_TASK:-1}"'
    lines += ["# Since 22.05 srun does not take this over from the job."] * bool(plan.cpus_per_task)
    lines += [f"export SRUN_CPUS_PER_TASK={cpus}"]
    if not plan.gpus_per_node:
        lines += ["# On the CPU, also where SLURM does not hide the GPUs of a node.", "export CUDA_VISIBLE_DEVICES="]
    lines += ["export SUBMITIT_EXECUTOR=slurm"]
    lines += _srun(plan, folder, cwd, interpreter)
    lines += [
        "",
        "# What was handed back, or may do better, is queued again; the exit code is the job's.",
        "code=0",
        f"{_END[plan.requeue]} || code=$?",
    ]
    if plan.requeue is True:
        lines += [
            "# In a container without scontrol that has left a word for this shell instead.",
            "for pause in 0 2 5; do  # a busy scheduler may not answer at once",
            f'    [ -e "$logs/{REQUEUE.name}" ] || break',
            f'    sleep "$pause"; if scontrol requeue "$(<"$logs/{REQUEUE.name}")"; then break; fi',
            "done",
        ]
    lines += ['exit "$code"']
    return "\n".join(lines) + "\n"


def _srun(plan: Plan, folder: Path, cwd: Path, interpreter: str) -> list[str]:
    options, before, shell = list(plan.srun), [], "bash"
    if plan.container is not None:
        folders, shell = (whole(folder), cwd), "sh"  # an image may have no other
        options += containers.srun_options(plan.container, folders, cwd)
        outside = containers.command(plan.container, folders, cwd, gpus=plan.gpus_per_node > 0)
        before = [shlex.join(outside)] if outside else []
        before += [shlex.join(containers.inside()) + ' PYTHONPATH="$TRAINKIT_RUN_DIR/code"']
        interpreter = shlex.quote(plan.container.python)
    extra = [f"    --{key}" + (f"={shlex.quote(value)}" if value else "") + " \\" for key, value in options]
    protected = [
        f'    {shell} -c \'trap "" USR2 TERM; exec "$@"\' rank \\',
        *[f"    {words} \\" for words in before],
    ]
    ranks = [
        "# The ranks ignore both signals until Python has its own handlers.",
        'srun --kill-on-bad-exit=1 --cpus-per-task="$SRUN_CPUS_PER_TASK" --unbuffered \\',
        *extra,
        '    --output="${logs//%/%%}/rank-%t.out" --error="${logs//%/%%}/rank-%t.err" \\',
        *protected,
        f"    {interpreter} -u -c {shlex.quote(TASK)} {shlex.quote(str(folder / '.submitit'))} || rc=$?",
    ]
    if plan.preflight:
        ranks = [
            "# The nodes first: what a bad one would cost is more than the minute that this takes at most.",
            'TORCH_CPP_LOG_LEVEL=FATAL srun --kill-on-bad-exit=0 --no-kill --cpus-per-task="$SRUN_CPUS_PER_TASK" '
            f"--time={LIMIT_MINUTES} \\",
            *extra,
            *protected,
            f'    {interpreter} -u -c {shlex.quote(CHECK)} >"$logs/{PREFLIGHT.name}" || :',
            "job preflight || rc=$?",
            'if [ "$rc" = 0 ]; then',
            *ranks,
            "fi",
        ]
    return [
        "",
        "# A preemption signals this shell too: it must outlive that, to requeue the job. SLURM signals the ranks.",
        "trap : TERM USR2",
        "rc=0",
        *ranks,
    ]


def _check_path(path: Path) -> None:
    # sbatch's header has no escape that all versions read alike.
    if any(char in str(path) for char in "'\"\\\n"):
        what = f"The folder {str(path)!r} cannot be written into a batch script."
        why = "Its name holds a quote, a backslash or a line break."
        raise UserError(what, why=why, fix="Use a folder with a plainer name.")


# A batch shell is no login shell, so `module` may be missing although the site has it.
_FIND_MODULES = """\
if ! command -v module > /dev/null; then
    for file in /etc/profile.d/{z00_lmod,lmod,modules}.sh /usr/share/{lmod/lmod,modules}/init/bash; do
        # shellcheck source=/dev/null
        if [ -r "$file" ]; then source "$file" || true; break; fi
    done
fi"""


def activation(environment: str | None, cwd: Path, python: str) -> tuple[list[str], str]:
    """Shell lines that make an environment the shell's own, and its interpreter as a word of the shell.

    Args:
        environment: ``venv:FOLDER``, ``conda:NAME``, ``uv:PROJECT``; None: what this program runs in.
        cwd: folders are relative to it.
        python: this interpreter.
    """
    if environment is None:
        return [], shlex.quote(python)
    kind, _, name = environment.partition(":")
    folder = str(cwd / Path(name).expanduser())
    if kind == "venv":
        quoted = shlex.quote(folder)
        lines = [f"export VIRTUAL_ENV={quoted}", 'export PATH="$VIRTUAL_ENV/bin:$PATH"']
        return lines, shlex.quote(f"{folder}/bin/python")
    if kind == "conda":
        where = shlex.quote(folder if "/" in name else name)
        lines = ['eval "$("${CONDA_EXE:-conda}" shell.bash hook)"', f"conda activate {where}"]
        return [*lines, 'python="$CONDA_PREFIX/bin/python"'], '"$python"'
    # As `uv sync` has left it: jobs of one project start at the same time, and must not change it under each other.
    # Asked for once, so that no process of uv's stands between srun's signals and the ranks.
    find = f"uv run --project {shlex.quote(folder)} --no-sync python -c 'import sys; print(sys.executable)'"
    return [f"python=$({find})"], '"$python"'


_KEY = "launch.dependency"
_JOB_ID = re.compile(r"\d+(_(\d+|\*))?(\+\d+)?")  # 4711, 4711_3, and sbatch's +MINUTES


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
            text = translated(str(item.value), find)
            if not text:
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
    if _JOB_ID.fullmatch(word):
        _require_no_run(word, find)
        return [word]
    runs = find(word)
    ids = [_job_id(run) for run in runs if not _is_met(kind, run)]
    arrays = {job_id.partition("_")[0] for job_id in ids}
    return list(arrays) if len(arrays) == 1 and len(ids) == len(runs) else ids


def _require_no_run(job_id: str, find: Find) -> None:
    """Raise UserError where a run is called like the job."""
    try:
        (run, *_) = find(job_id)
    except UserError:
        return
    why = f"sbatch takes the number for a job's, and there is {run.path}."
    fix = f"Give the job of the run by its path, ./{os.path.relpath(run.path)}, or rename the run."
    raise UserError(f"--dependency {job_id} is a job and a run.", why=why, fix=fix, key=_KEY)


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
    if submission is not None and built_in(submission.executor).batch and submission.job_id:
        return submission.job_id
    why = "It was never submitted." if submission is None else f"It runs by the executor {submission.executor}."
    fix = "Name a run that was submitted to SLURM, or leave the dependency out."
    raise UserError(f"No job can wait for {run.name}: it has no job in SLURM.", why=why, fix=fix, key=_KEY)
