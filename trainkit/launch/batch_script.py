"""The sbatch script of a run or of a sweep: pure text, the same for a dry run and for the submission after it."""

from __future__ import annotations

import shlex
from pathlib import Path

from trainkit.errors import UserError
from trainkit.launch import containers
from trainkit.launch.batch_job import MARKER
from trainkit.launch.environment import activation, module_lines
from trainkit.launch.node_check import LIMIT_MINUTES
from trainkit.launch.plan import Plan
from trainkit.launch.preflight import FILE
from trainkit.launch.sweeps import is_part, whole

# `python -c` puts the current folder ("") first on the path, before PYTHONPATH, so a job submitted from a checkout
# would run the checkout and not its snapshot: it goes to the end. (`python -P` is 3.11 and newer.)
BEGIN = "import os, sys; sys.path = [path for path in sys.path if path] + [os.getcwd()]; "
BEGIN += "from trainkit import importing; importing.installed_first(); "
TASK = BEGIN + (
    "from trainkit.process import leave; from submitit.core.submission import submitit_main; submitit_main(); leave(0)"
)
CHECK = BEGIN + "import runpy; runpy.run_module('trainkit.distributed.health', run_name='__main__')"

_END = {True: 'job end "$rc"', False: 'job end "$rc" --no-requeue', "chain": 'job end "$rc" --chain'}


def batch_script(plan: Plan, run_path: Path, *, cwd: Path, python: str, points: int = 1) -> str:
    """The whole script.

    Args:
        run_path: folder of the run; of the sweep, whose runs are its folders 0, 1, 2, ..., if ``points`` is above one.
        cwd: where the job runs: the folder of the submission.
        python: the interpreter.
    """
    _check_path(run_path)
    _check_path(cwd)
    run = shlex.quote(str(run_path)) + ('/"$SLURM_ARRAY_TASK_ID"' if points > 1 else "")
    if is_part(run_path):  # which has links to the runs
        run = f'"$(readlink -f {run})"'
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{item.name}" + _value(item.value) for item in plan.directives]
    lines += ["", "set -euo pipefail", f"cd {shlex.quote(str(cwd))}"]
    lines += ["# Where jobs are submitted with --export=NONE, srun would start the ranks without a PATH."]
    lines += ["export SLURM_EXPORT_ENV=ALL"]
    activate, interpreter = activation(plan.environment, cwd, python)
    if setup := [*module_lines(plan.modules), *plan.setup, *activate]:
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
    if plan.cpus_per_task:
        lines += [
            "# Since 22.05 srun does not take this over from the job.",
            'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        ]
    else:
        lines += ['export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"']
    if not plan.gpus_per_node:
        lines += ["# On the CPU, also where SLURM does not hide the GPUs of a node.", "export CUDA_VISIBLE_DEVICES="]
    lines += ["export SUBMITIT_EXECUTOR=slurm"]
    lines += _srun(plan, run_path, cwd, interpreter)
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
            f'    [ -e "$logs/{MARKER}" ] || break',
            f'    sleep "$pause"; if scontrol requeue "$(<"$logs/{MARKER}")"; then break; fi',
            "done",
        ]
    lines += ['exit "$code"']
    return "\n".join(lines) + "\n"


def _srun(plan: Plan, run_path: Path, cwd: Path, interpreter: str) -> list[str]:
    options, before, shell = list(plan.srun), [], "bash"
    if plan.container is not None:
        folders, shell = (whole(run_path), cwd), "sh"  # an image may have no other
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
        f"    {interpreter} -u -c {shlex.quote(TASK)} {shlex.quote(str(run_path / '.submitit'))} || rc=$?",
    ]
    if plan.preflight:
        ranks = [
            "# The nodes first: what a bad one would cost is more than the minute that this takes at most.",
            'TORCH_CPP_LOG_LEVEL=FATAL srun --kill-on-bad-exit=0 --no-kill --cpus-per-task="$SRUN_CPUS_PER_TASK" '
            f"--time={LIMIT_MINUTES} \\",
            *extra,
            *protected,
            f'    {interpreter} -u -c {shlex.quote(CHECK)} >"$logs/{FILE}" || :',
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


def _value(value: object) -> str:
    return "" if value is None else f"={shlex.quote(str(value))}"


def _check_path(path: Path) -> None:
    # sbatch's header has no escape that all versions read alike.
    if any(char in str(path) for char in "'\"\\\n"):
        raise UserError(
            f"The folder {str(path)!r} cannot be written into a batch script.",
            why="Its name holds a quote, a backslash or a line break.",
            fix="Use a folder with a plainer name.",
        )
