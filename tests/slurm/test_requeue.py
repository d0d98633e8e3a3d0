"""Jobs whose scheduler does not answer when they end, or forbids what they ask of it."""

import functools
import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.light_experiment import STATE, STEPS, trained
from tests.runs import script
from tests.slurm.conftest import Cluster
from tests.slurm.test_train_sbatch import edited, run_of

pytestmark = pytest.mark.slurm

ONE_RANK = ("--nodes", "1", "--gpus-per-node", "0", "--time", "20")
# Twelve seconds in which a run can be told to save, on a busy machine too; told, it does not wait for their end.
SLOW = (*ONE_RANK, "model.name=light_model:build", "model.seconds=1.5", "monitor.loggers=[jsonl]")

FAILING = """\
# A scheduler that fails in a job: each command of it so often, and a requeue always if that is forbidden.
name=${0##*/}
if [ -n "${SLURM_JOB_ID:-}" ] && [ "$name" != sbatch ]; then
    if [ "${FORBIDDEN:-}" ] && [ "$1" = requeue ]; then echo "Requeue is disabled here" >&2; exit 1; fi
    echo "$*" >> "$FAILURES/$SLURM_JOB_ID.$name"
    if [ "$(wc -l < "$FAILURES/$SLURM_JOB_ID.$name")" -le 2 ]; then
        echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1
    fi
fi
PATH=${PATH#*:} exec "$name" "$@"
"""


class Runs:
    """Runs that were submitted at once, by name: their jobs wait for one another no longer than they must."""

    def __init__(self, cluster: Cluster, env: dict[str, str]) -> None:
        self.cluster, self.env = cluster, env
        self.jobs: dict[str, str] = {}

    def submit(self, name: str, env: dict[str, str], *more: str) -> None:
        self.jobs[name] = self.cluster.submit(name, *SLOW, *more, env=env).job_id

    def path(self, name: str) -> Path:
        return self.cluster.home / "runs" / name

    def wait(self, name: str) -> str:
        """The state in which the run's newest job has ended."""
        return self.cluster.wait(self.cluster.events(self.path(name), "submitted")[-1]["job_id"], timeout=240)

    def trained(self, name: str) -> str:
        """Return the result of its training."""
        return str(json.loads((self.path(name) / STATE).read_text())[1])


@pytest.fixture(scope="module")
def runs(devcluster: Cluster, light: dict[str, str]) -> Runs:
    """Each of the runs of this file, submitted, and told to save as before a time limit."""
    commands, failures = devcluster.home / "commands", devcluster.home / "failures"
    failures.mkdir()
    for name in ("squeue", "scontrol"):
        script(commands / name, FAILING)
    broken = {**light, "PATH": f"{commands}:{devcluster.env['PATH']}", "FAILURES": str(failures)}
    all_runs = Runs(devcluster, broken)
    all_runs.submit("silent", broken)
    all_runs.submit("forbidden", {**broken, "FORBIDDEN": "yes"})
    after = ("--wrap", "date +%s > after-silent", "-o", "/dev/null", "-d", f"afterok:{all_runs.jobs['silent']}")
    devcluster.sbatch(*after)
    for name in ("silent", "forbidden"):
        devcluster.wait_for_start(all_runs.path(name))
        devcluster.run("scancel", "--signal=USR2", all_runs.jobs[name])
    return all_runs


@pytest.mark.long
def test_a_scheduler_that_does_not_answer_at_the_end_loses_no_training(devcluster: Cluster, runs: Runs) -> None:
    assert runs.wait("silent") == "COMPLETED", devcluster.logs()
    path = runs.path("silent")
    first, second = devcluster.events(path, "started")
    assert 0 < second["step"] < first["total_steps"]
    assert json.loads((path / "summary.json").read_text())["outcome"] == "finished"
    assert runs.trained("silent") == trained(first["total_steps"])
    devcluster.wait_for("the job after it", (devcluster.home / "after-silent").exists)
    ended = devcluster.events(path, "ended")[-1]
    assert ended["state"] == "COMPLETED"
    assert int((devcluster.home / "after-silent").read_text()) >= int(ended["time"]), "it must not start before"


def test_where_requeueing_is_forbidden_a_chain_of_jobs_trains_the_run(devcluster: Cluster, runs: Runs) -> None:
    submitted = functools.partial(devcluster.events, runs.path("forbidden"), "submitted")
    devcluster.wait_for("the job that goes on", lambda: len(submitted()) == 2)
    assert runs.wait("forbidden") == "COMPLETED", devcluster.logs()
    first, second = submitted()
    assert second["continues"] == first["job_id"] == runs.jobs["forbidden"]
    assert devcluster.wait(first["job_id"]) == "FAILED", "what waits for a finished training must not start"
    assert len(devcluster.events(runs.path("forbidden"), "started")) == 2
    assert runs.trained("forbidden") == trained(STEPS)


@pytest.mark.long
def test_where_requeueing_is_forbidden_a_template_goes_on_by_a_chain(devcluster: Cluster, runs: Runs) -> None:
    runs.wait("silent")
    flags = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1", "--time=20")
    words = (edited(devcluster, "train.sbatch"), "ddp", "model.name=light_model:build", "model.seconds=0.5")
    job = devcluster.sbatch(*flags, *words, env={**runs.env, "FORBIDDEN": "yes"})
    run = run_of(devcluster, job)
    devcluster.wait_for_start(run)
    devcluster.run("scancel", "--signal=USR2", job)
    devcluster.wait_for("the next link", lambda: len(devcluster.events(run, "submitted")) == 2)
    second = devcluster.events(run, "submitted")[1]["job_id"]
    assert devcluster.wait(second, timeout=240) == "COMPLETED", devcluster.logs()
    assert devcluster.wait(job) == "FAILED", "what waits for a finished training must not start"
    (shown,) = [line for line in devcluster.job("status").stdout.splitlines() if line.startswith(run.name)]
    assert second in shown
    assert len(devcluster.events(run, "started")) == 2
    assert str(json.loads((run / STATE).read_text())[1]) == trained(STEPS)


WITHOUT_SCONTROL = """\
# As in a container: what the kit starts has nothing of SLURM's, and the script's own shell has.
case "$*" in *launch.batch_job*) export PATH=/nowhere ;; esac
exec {python} "$@"
"""


@pytest.mark.long
def test_without_scontrol_the_shell_of_the_batch_script_requeues(
    devcluster: Cluster, runs: Runs, light: dict[str, str]
) -> None:
    python = WITHOUT_SCONTROL.format(python=shlex.quote(sys.executable))
    script(devcluster.home / "contained" / "bin" / "python", python)
    runs.submit("contained", light, "launch.environment=venv:contained")
    devcluster.wait_for_start(runs.path("contained"))
    devcluster.run("scancel", "--signal=USR2", runs.jobs["contained"])
    assert runs.wait("contained") == "COMPLETED", devcluster.logs()
    assert (runs.path("contained") / "logs" / "0" / "requeue").read_text().strip() == runs.jobs["contained"]
    assert devcluster.states(runs.jobs["contained"]) == ["REQUEUED", "COMPLETED"]
    assert runs.trained("contained") == trained(STEPS)
