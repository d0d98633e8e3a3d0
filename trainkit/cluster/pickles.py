"""Programs of ranks and scripts, their environment, and submitit's pickles that they run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import Function
from trainkit.common import fileio
from trainkit.common.process import memory_variables, python_path, scrubbed, visible_cpus
from trainkit.run.events import RUN_DIR
from trainkit.run.folder import RunDir, as_open_as

if TYPE_CHECKING:
    from jinja2 import Template

PYTHON_FLAGS = ("-P", "-u")
"""Flags of Python for ranks. Without -P the current folder would come before PYTHONPATH, and a job submitted from a
checkout would run that, and not its snapshot."""
BEGIN = "import os, sys; sys.path.append(os.getcwd()); "
BEGIN += "from importlib import import_module, util; is_new = util.find_spec('trainkit.common'); "
BEGIN += "import_module('trainkit.common.imports' if is_new else 'trainkit.importing').installed_first(); "
# A run goes on with its own code, which may be of a version that had these modules elsewhere.
TASK = BEGIN + (
    "older = 'trainkit.process' if util.find_spec('trainkit.process') else 'trainkit.lifetime'; "
    "leave = import_module('trainkit.common.process' if is_new else older).leave; "
    "from submitit.core.submission import submitit_main; submitit_main(); leave(0)"
)
"""Program of a rank: it runs the function in the pickle of the rank's job."""


def unclaimed(index: int) -> str:
    """File name of a run's pickle until its job id is known; ``index``: the run's number in a sweep."""
    return f"{index}.pkl"


def pickled(folder: Path, runs: Sequence[RunDir], function: Function, start: Callable[[], str]) -> list[str]:
    """Write submitit's pickle for each run, which `TASK` runs, and start the job; the job id of each run.

    ``start`` starts a job for one run, an array for several, and returns its id.
    """
    with as_open_as(folder):  # submitit's files, the scheduler's (it takes the umask over), the ranks'
        pickles = write_pickles(folder, runs, function)
        first = start()  # should this fail, the job may be there all the same: it claims its own
        ids = [first]
        if len(runs) > 1:
            ids = [f"{first}_{index}" for index in range(len(runs))]
        for index, job_id in enumerate(ids):
            (pickles / unclaimed(index)).rename(pickles / f"{job_id}_submitted.pkl")
    return ids


def write_pickles(folder: Path, runs: Sequence[RunDir], function: Function) -> Path:
    """Write a pickle for each run that no job has claimed; their folder. It holds a path and no code."""
    from submitit.core.utils import DelayedSubmission  # a dry run and `--help` do without

    pickles = folder / ".submitit"
    fileio.make_folder(pickles, folder)
    for index, run in enumerate(runs):
        DelayedSubmission(function, str(run.path)).dump(pickles / unclaimed(index))
    return pickles


@cache  # a sweep writes many scripts
def shell_template(name: str) -> Template:
    """Load a template of a program from this folder; its filter ``quote`` makes one word of the shell."""
    import jinja2  # most commands do without

    templates = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    templates.filters["quote"] = lambda value: shlex.quote(str(value))
    return templates.from_string(fileio.read_text(Path(__file__).with_name(name), follow=True))


def environment_of_ranks(run: RunDir, plan: Plan, env: Mapping[str, str]) -> dict[str, str]:
    """Return what all ranks of this machine have alike, but for their attempt and their threads.

    The first ranks are forks of the controller, so that it has all of this from its start: what the kernel tells of a
    process's environment, and the C library reads of it, is of that time. The code is the snapshot: edits cannot reach
    the attempts to come.
    """
    common = scrubbed(env) | {RUN_DIR: str(run.path), "PYTHONPATH": python_path(run.code, env)}
    return common if plan.gpus_per_node else common | memory_variables(env)


def thread_variables(plan: Plan, count: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the threads of each of ``count`` ranks that share this process's CPUs.

    On the CPU that is its share, or ranks would get in one another's way; see `device.intra_op_threads`.
    """
    threads = 1 if plan.gpus_per_node else max(visible_cpus() // count, 1)
    return {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(threads)}
